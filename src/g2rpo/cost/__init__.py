"""What a run will cost before it runs: counting.py (exact), memory.py (traced by shape), seconds.py (a card, or a probe)."""
