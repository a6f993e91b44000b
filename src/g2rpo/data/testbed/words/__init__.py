"""The testbed's words: pictures of one written word, prompts, and judges of ink, paper and
drawing."""
