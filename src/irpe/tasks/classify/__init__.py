"""Classifiers of images: their data, model, loss and score."""
