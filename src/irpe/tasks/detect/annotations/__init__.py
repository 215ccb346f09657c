"""Images with boxes, in the layouts of COCO and Pascal VOC."""
