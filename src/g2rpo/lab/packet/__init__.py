"""A packet: a page with base and tuned pictures side by side, for other people to judge without
knowing which is which."""
