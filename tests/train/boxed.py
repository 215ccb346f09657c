"""Little folders of images with boxes."""

import json

from PIL import Image

WIDTH, HEIGHT = 40, 24
CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "zebra"}, {"id": 5, "name": "cat"}]


def picture(size=(WIDTH, HEIGHT)):
    return Image.new("RGB", size)


def annotation(key, image_id, category_id, bbox, **others):
    return {"id": key, "image_id": image_id, "category_id": category_id, "bbox": bbox, **others}


def coco_content():
    """Three images: two boxes and a crowd, one box over the edge, none."""
    images = [
        {"id": key, "file_name": f"{key}.png", "width": WIDTH, "height": HEIGHT}
        for key in (20, 10, 30)
    ]
    annotations = [
        annotation(1, 10, 5, [30.5, 10, 20, 30], area=150.0, iscrowd=0),
        annotation(2, 20, 3, [1, 2, 3, 4.5], area=12.0, iscrowd=0, segmentation=[[1, 2, 4, 2]]),
        annotation(3, 20, 7, [0, 0, 40, 24], area=900, iscrowd=1),
        annotation(4, 20, 7, [10, 11, 12, 13]),
    ]
    return {"images": images, "annotations": annotations, "categories": CATEGORIES}


def make_coco(root, content=None, name="train2017", folder="train2017"):
    (root / folder).mkdir(parents=True, exist_ok=True)
    for image in coco_content()["images"]:
        picture().save(root / folder / image["file_name"])
    (root / "annotations").mkdir(exist_ok=True)
    path = root / "annotations" / f"instances_{name}.json"
    path.write_text(json.dumps(content or coco_content()))
    return path


def voc_object(name, box, difficult=0):
    sides = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    bndbox = "".join(f"<{side}>{value}</{side}>" for side, value in sides)
    return (
        f"<object><name>{name}</name><difficult>{difficult}</difficult>"
        f"<part><name>head</name><bndbox><xmin>9</xmin></bndbox></part>"
        f"<bndbox>{bndbox}</bndbox></object>"
    )


def voc_text(*objects, size=(WIDTH, HEIGHT), filename="a.png"):
    return (
        f"<annotation><filename>{filename}</filename><size><width>{size[0]}</width>"
        f"<height>{size[1]}</height></size>{''.join(objects)}</annotation>"
    )


def make_voc(root, texts, split="train"):
    """Writes a split of images with the names and annotations given."""
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(texts) + "\n\n")
    for name, text in texts.items():
        picture().save(root / "JPEGImages" / f"{name}.png")
        (root / "Annotations" / f"{name}.xml").write_text(text)
    return root
