"""The explorer page as a file: whole, self-contained, and holding what the model learned."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest
import torch

import irpe
from irpe.viz import capture, default_image, explorer_page

pytest.importorskip("timm", reason="needs the extra 'timm'")
pytest.importorskip("PIL", reason="needs the extra 'viz'")

from adapters.small_models import images, make_swin, make_vit, perturb

VOID = {"input", "meta"}


class Reader(HTMLParser):
    """Notes ids, attributes and text by element, and checks that elements are nested."""

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.attributes, self.scripts = [], [], [], {}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append((tag, dict(attributes).get("id")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "script":
            self.scripts[self.open[-1][1]] = self.scripts.get(self.open[-1][1], "") + data


def learned_page(spec, name="a run", height=24, width=40):
    model = perturb(irpe.equip(make_vit(dynamic_img_size=True), spec))
    calls = capture(model, images(height, width, batch=1))
    return calls, explorer_page(calls, default_image(), name)


@pytest.mark.parametrize("page", [explorer_page(), learned_page("product-contextual-k")[1]])
def test_the_page_is_whole_and_needs_nothing_else(page):
    reader = Reader(page)
    assert len(reader.ids) == len(set(reader.ids))
    assert set(re.findall(r'\$\("([\w-]+)"\)', reader.scripts[None])) <= set(reader.ids)
    assert not re.search(r"\{\{|https?://|url\(|@import|fetch\(|XMLHttp|<link|<iframe", page)
    assert not [a for a in reader.attributes if a[1] in ("src", "href", "action")]
    policy = dict(a[1:] for a in reader.attributes if a[0] == "meta" and a[1] == "content")
    assert policy["content"].startswith("default-src 'none'; ")
    assert len(page.encode()) < 5_000_000


def test_ids_that_labels_and_descriptions_name_exist():
    reader = Reader(explorer_page())
    named = [a[2] for a in reader.attributes if a[1] in ("aria-describedby", "aria-labelledby")]
    assert named
    assert set(named) <= set(reader.ids)


def numbers(text, *shape):
    raw = bytearray(base64.b64decode(text))
    return torch.frombuffer(raw, dtype=torch.float16).float().view(*shape)


@pytest.mark.parametrize(
    "spec",
    ["product-contextual-k", "cross-contextual-qk@1.5+unshared", "quantization-bias-k@clip3"],
)
def test_extra_weights_can_be_looked_up_in_the_page(spec):
    calls, page = learned_page(spec)
    run = json.loads(Reader(page).scripts["run"])
    assert [block["name"] for block in run["blocks"]] == [call.name for call in calls]
    for call, block in zip(calls, run["blocks"], strict=True):
        assert (block["grid"], block["prefix"], block["heads"]) == ([3, 5], 1, 2)
        maps, b = call.encoding.maps(call.grid), torch.zeros(2, 16, 16)
        for term in block["terms"]:
            item = maps[term["map"]]
            z = numbers(term["data"], 2, term["owners"], item.num_used_buckets)
            for i in range(16):
                for j in range(16):
                    owner = {"query": i, "key": j, "nobody": 0}[term["owner"]]
                    b[:, i, j] += z[:, owner, int(item.compact_ids[i, j])]
        torch.testing.assert_close(b, call.extra_weights(), rtol=2e-3, atol=2e-3)


def test_norms_of_the_tables_are_in_the_page():
    calls, page = learned_page("cross-contextual-kv+unshared")
    run = json.loads(Reader(page).scripts["run"])
    tables = run["blocks"][1]["tables"]
    names = ["key, rows", "key, columns", "value, rows", "value, columns"]
    assert [table["name"] for table in tables] == names
    learned = calls[1].encoding.value_tables[1].detach()[:, :-1].norm(dim=-1).mean(0)
    shown = numbers(tables[3]["data"], tables[3]["columns"])
    torch.testing.assert_close(shown, learned.flip(0), rtol=1e-3, atol=1e-3)


def test_a_name_cannot_end_its_element():
    name = "</script><script>alert(1)</script>"
    reader = Reader(learned_page("product-bias-k", name)[1])
    assert json.loads(reader.scripts["run"])["name"] == name
    assert "alert" not in reader.scripts[None]


def test_attentions_need_their_picture():
    calls, _ = learned_page("product-bias-k")
    with pytest.raises(ValueError, match="pass image= too"):
        explorer_page(calls)


def test_windows_are_refused():
    calls = capture(irpe.equip(make_swin(), "product-bias-k"), images(batch=1))
    with pytest.raises(ValueError, match=r"layers\.0\.blocks\.0\.attn works on several images or"):
        explorer_page(calls, default_image())


def test_a_page_that_would_be_too_large_is_refused():
    calls, _ = learned_page("quantization-contextual-qk", height=128, width=128)
    with pytest.raises(ValueError, match=r"would have \d+\.\d MB, more than 5: choose fewer"):
        explorer_page(calls * 20, default_image())


def test_numbers_beyond_sixteen_bits_are_refused():
    model = irpe.equip(make_vit(), "product-bias-k")
    torch.nn.init.constant_(model.blocks[0].attn.rpe.bias_tables[0], 1e6)
    with pytest.raises(ValueError, match="exceed 16-bit numbers"):
        explorer_page(capture(model, images(batch=1)), default_image())
