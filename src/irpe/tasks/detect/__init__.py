"""Detectors: images with boxes, DETR, its loss and average precision."""
