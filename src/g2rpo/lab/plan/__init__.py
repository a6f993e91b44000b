"""The cost of a run, estimated beforehand: counting.py (exact), memory.py (traced), seconds.py (a
card, or a probe)."""
