"""Boxes as COCO has them, and detections of them."""

import random


def truth(image, category, box, crowd=0):
    area = box[2] * box[3]
    return {"image_id": image, "category_id": category, "bbox": box, "area": area, "iscrowd": crowd}


def found(image, category, box, score=0.9):
    return {"image_id": image, "category_id": category, "bbox": box, "score": score}


def dataset(annotations, images=(1, 2), categories=(3, 7)):
    return {
        "images": [{"id": i, "width": 640, "height": 480} for i in images],
        "annotations": [{"id": n, **one} for n, one in enumerate(annotations, 1)],
        "categories": [{"id": c, "name": f"class {c}"} for c in categories],
    }


def scene(seed, images=8, categories=(3, 7, 40)):
    """Random boxes of all sizes, some crowds, and detections: near, far, twice, and tied."""
    draw = random.Random(seed)
    annotations, detections = [], []
    for image, category in ((i, c) for i in range(1, images + 1) for c in categories[:-1]):
        for _ in range(draw.randrange(6)):
            size = draw.choice([20, 60, 180])
            box = [draw.uniform(0, 400), draw.uniform(0, 250), size * draw.uniform(0.5, 1.2), size]
            annotations.append(truth(image, category, box, int(draw.random() < 0.15)))
            for _ in range(draw.randrange(4)):
                moved = [value + draw.gauss(0, size / 15) for value in box]
                detections.append(found(image, category, moved, round(draw.random(), 1)))
        detections.append(found(image, categories[-1], [1, 2, 30, 40], draw.random()))
    draw.shuffle(detections)
    return dataset(annotations, range(1, images + 1), categories), detections
