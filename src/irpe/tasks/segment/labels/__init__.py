"""Label maps: images whose pixels are classes, in the layouts that datasets have."""
