"""Semantic segmentation: a class for each pixel, on a plain vision transformer."""
