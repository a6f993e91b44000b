"""Trained weights in the formats that other programs read."""
