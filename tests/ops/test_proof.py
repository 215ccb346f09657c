"""A GPU proves the kernels itself: the same lines on the CPU, with planted candidates."""

import copy
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import planted
import pytest
import torch
from signatures import CPU, CROSS, K, call_of, prover_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from irpe import UserError
from irpe.ops.proof import verdicts
from irpe.ops.proof.judge import judge
from irpe.ops.proof.prepare import prepare_model
from irpe.ops.proof.problem import small_problems
from irpe.ops.proof.signature import signature_of, size_class_of
from irpe.ops.proof.timing import seconds_of
from irpe.ops.proof.verdicts import Record, Verdict, VerdictFile, cache_directory
from irpe.profile.measure import peak_memory


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IRPE_CACHE", str(tmp_path / "cache"))
    for name in ("IRPE_PROOF", "IRPE_TUNE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def content_of(cache):
    (path,) = cache.glob("proofs-*.json")
    return json.loads(path.read_text())


def choose_and_listen(prover, call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name = prover.choose(call)
    return name, [str(w.message) for w in caught]


# What each planted candidate is found out by; "" where it passes.
FAULTS = {
    "Right": "",
    "Slow": "",
    "WrongOutput": "output at 73 tokens has",
    "WrongGradient": "gradient of k at 73 tokens has",
    "NaNAtOneSize": "output differs from that of fast",
    "NaNWhenSmall": "output at 13 tokens has nan times",
    "Raises": "RuntimeError: the compiler gave up",
    "OutOfMemory": "out of memory",
    "OutOfMemoryWhenLarge": "",
    "OtherBits": "output differs from one run to the next",
    "Dies": "signal 11: an illegal memory access was encountered",
    "Exits": "it ended with status 0",
}


@pytest.fixture(scope="module")
def proved(tmp_path_factory):
    """All planted candidates after one call: the prover, the call, the warnings, the file."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRPE_CACHE", str(cache))
        prover, call = prover_of(*FAULTS), call_of()
        name, warned = choose_and_listen(prover, call)
        return prover, call, name, warned, content_of(cache)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_warned_of_written_down_and_explained(name, proved):
    prover, call, chosen, warned, content = proved
    (record,) = content["records"].values()
    known = prover.known(call)[name]
    about = [text for text in warned if text.startswith(f"{name} is not used for cpu, float32")]
    alone = prover.best_known(signature_of(call), size_class_of(call), (name,))
    if FAULTS[name]:
        assert alone == "fast"
        assert FAULTS[name] in known
        (text,) = about
        assert FAULTS[name] in text
        assert f"{chosen} is used" in text
        assert Path(text.rpartition("python ")[2]).is_file()
    else:
        assert not about
        assert "times PyTorch's own error (" in known
    if name == "OutOfMemory":  # which says nothing about the candidate
        assert name not in record["verdicts"]
    elif name == "OutOfMemoryWhenLarge":
        (seconds,) = record["seconds"].values()
        assert seconds[name] is None
        assert known.endswith(f"ran out of memory; fast {1000 * seconds['fast']:.3g} ms")
    else:
        assert FAULTS[name] in record["verdicts"][name]["error"]


def test_the_fastest_of_what_passed_is_chosen(proved):
    prover, call, chosen, _, content = proved
    ((seconds),) = next(iter(content["records"].values()))["seconds"].values()
    assert set(seconds) == {"Right", "Slow", "OutOfMemoryWhenLarge", "fast"}
    assert chosen == min(("Right", "Slow", "fast"), key=seconds.get)
    assert chosen != "Slow"
    assert prover.choices == {f"{signature_of(call)}; {size_class_of(call)}": chosen}


def test_a_reproduction_finds_the_fault_again(proved):
    text = next(text for text in proved[3] if text.startswith("WrongGradient"))
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, text.rpartition("python ")[2]],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gradient of k at 73 tokens has" in done.stdout


def test_a_hang_is_ended_and_the_next_candidate_is_taken():
    start, prover = time.monotonic(), prover_of("Hangs", "Right", time_limit=8.0)
    name, (warned,) = choose_and_listen(prover, call_of())
    assert name in ("Right", "fast")
    assert "no answer within 8 seconds" in warned
    assert time.monotonic() - start < 100


def test_what_lies_about_masks_fails_for_calls_with_masks_alone(monkeypatch):
    monkeypatch.setenv("IRPE_TUNE", "off")
    prover = prover_of("Lies")
    assert prover.choose(call_of()) == "Lies"
    name, (warned,) = choose_and_listen(prover, call_of(mask="boolean 11qk"))
    assert name == "fast"
    assert "NotImplementedError: no masks" in warned


def test_dropout_is_proved_by_what_is_dropped(monkeypatch):
    monkeypatch.setenv("IRPE_TUNE", "off")
    prover = prover_of("KeepsAll", "Right")
    name, (warned,) = choose_and_listen(prover, call_of(dropout="dropout", value="heads"))
    assert name == "Right"
    assert "keeps 100.0% of the weights" in warned
    assert not choose_and_listen(prover, call_of(value="heads"))[1]


def test_what_does_not_take_a_call_is_not_asked(monkeypatch):
    def refuse(*_):
        raise AssertionError("nothing to prove")

    prover = prover_of("Picky")
    monkeypatch.setattr(prover, "prove", refuse)
    assert prover.choose(call_of(mask="boolean 11qk")) == "fast"


def forbid_proofs(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_a_verdict_is_used_by_later_processes_and_by_other_sizes(cache, monkeypatch):
    call = knows(cache, "Right", Right=1.0, fast=2.0)
    forbid_proofs(monkeypatch)
    prover = prover_of("Right")
    assert prover.choose(call) == "Right"
    assert prover.choose(call_of(grid=(7, 15))) == "Right"  # up to 128 tokens as well
    with pytest.raises(AssertionError, match="a process was started"):
        prover.choose(call_of(grid=(7, 19)))
    monkeypatch.setenv("IRPE_TUNE", "off")
    assert prover.choose(call_of(grid=(7, 19))) == "Right"


def test_settings_decide_what_is_run(monkeypatch, cache):
    with monkeypatch.context() as patch:
        forbid_proofs(patch)
        patch.setenv("IRPE_PROOF", "off")
        assert prover_of("Right").choose(call_of()) == "fast"
        patch.setenv("IRPE_PROOF", "maybe")
        with pytest.raises(UserError, match="IRPE_PROOF 'maybe' is not one of on, off, force"):
            prover_of("Right").choose(call_of())
    monkeypatch.setenv("IRPE_TUNE", "off")
    prover_of("Right").choose(call_of())
    first = content_of(cache)
    monkeypatch.setenv("IRPE_PROOF", "force")
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(1) or popen(*a, **k))
    prover = prover_of("Right")
    assert [prover.choose(call_of()) for _ in range(2)] == ["Right"] * 2
    assert len(started) == 1
    assert content_of(cache)["records"].keys() == first["records"].keys()


def knows(cache, *passed, **seconds):
    """Writes that candidates passed for the call of this file, and how long they took."""
    call = call_of()
    record = Record(dict.fromkeys(passed, PASSED), {str(size_class_of(call)): seconds})
    VerdictFile(cache).add({str(signature_of(call)): record})
    return call


def test_timings_do_not_decide_where_bits_must_be_the_same(cache, monkeypatch):
    call = knows(cache, "Slow", "Right", Slow=3.0, Right=1.0, fast=2.0)
    forbid_proofs(monkeypatch)
    assert prover_of("Slow", "Right").choose(call) == "Right"
    assert prover_of("Right").choose(call) == "Right"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert prover_of("Slow", "Right").choose(call) == "Slow"  # the first that passed
        assert prover_of("Nondeterministic", "Right").choose(call) == "Right"
    prover = prover_of("Slow", "Right")
    assert prover.choose(call) == "Right"
    recorded = dict.fromkeys(prover.choices, "fast")
    prover.recall(recorded)  # as a run that goes on does
    assert prover.choose(call) == "fast"
    assert prover.choices == recorded


def test_what_ran_out_of_memory_has_lost(cache, monkeypatch):
    call = knows(cache, "Slow", "Right", Slow=None, Right=2.0, fast=None)
    forbid_proofs(monkeypatch)
    assert prover_of("Slow", "Right").choose(call) == "Right"


PASSED = Verdict("", 0.9, "output", "2026-01-01 12:00")
KNOWN = {"a signature": Record({"Right": PASSED}, {"a size": {"Right": 0.1, "fast": None}})}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"records": {}}', "\0\1", '"error": "no"'])
def test_a_damaged_file_counts_as_empty_and_is_written_anew(damage, cache):
    file = VerdictFile(cache)
    assert file.read() == {}
    assert file.add(KNOWN) is None
    assert VerdictFile(cache).read() == KNOWN
    good = file.path.read_text()
    file.path.write_text(good.replace('"error": ""', damage) if "error" in damage else damage)
    assert file.read() == {}
    assert file.add(KNOWN) is None
    assert file.path.read_text() == good
    assert [path.name for path in cache.iterdir()] == [file.path.name]


def test_what_others_wrote_meanwhile_stays(cache):
    first, second = VerdictFile(cache), VerdictFile(cache)
    first.add(KNOWN)
    second.add({"another": Record({"Wrong": Verdict("no", 9.0, "output", "today")})})
    third = {"a signature": Record({"Wrong": PASSED}, {"a size": {"Wrong": 0.2}})}
    first.add(third)
    found = first.read()
    assert found.keys() == {"a signature", "another"}
    assert found["a signature"].verdicts.keys() == {"Right", "Wrong"}
    assert found["a signature"].seconds["a size"] == {"Right": 0.1, "fast": None, "Wrong": 0.2}


@pytest.mark.parametrize("changed", ["torch", "triton", "driver", "source"])
def test_another_environment_has_another_file(changed, cache, monkeypatch):
    VerdictFile(cache).add(KNOWN)
    found = verdicts.environment()
    assert found[changed] or changed in ("driver", "triton")
    monkeypatch.setattr(verdicts, "environment", lambda: {**found, changed: "other"})
    assert VerdictFile(cache).read() == {}


def test_without_a_place_for_files_proofs_last_as_long_as_the_process(monkeypatch, tmp_path):
    monkeypatch.setenv("IRPE_TUNE", "off")
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("IRPE_CACHE", str(in_the_way / "cache"))
    prover = prover_of("Right")
    name, (warned,) = choose_and_listen(prover, call_of())
    assert name == "Right"
    assert "proofs cannot be kept" in warned
    assert "IRPE_CACHE" in warned
    assert choose_and_listen(prover, call_of()) == ("Right", [])


def test_without_a_home_there_is_no_place(monkeypatch):
    for name in ("IRPE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_directory() is None
    assert VerdictFile(None).add({}) == "there is no home directory"


def test_threads_that_need_one_verdict_prove_once(monkeypatch, cache):
    monkeypatch.setenv("IRPE_TUNE", "off")
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(1) or popen(*a, **k))
    prover, call, found = prover_of("Right"), call_of(), []
    threads = [threading.Thread(target=lambda: found.append(prover.choose(call))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["Right"] * 2
    assert len(started) == 1


def test_nobody_waits_for_ever_for_another_process(cache, monkeypatch):
    file = VerdictFile(cache)
    with file.lock(1.0) as is_held:
        assert is_held
        prover = prover_of("Right", longest_wait=1.0)
        name, (warned,) = choose_and_listen(prover, call_of())
    assert name == "fast"
    assert "another process" in warned


def test_nothing_is_proved_without_values_and_what_is_known_is_used(cache, monkeypatch):
    forbid_proofs(monkeypatch)
    prover = prover_of("Right")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call_of()
        fake = fake.with_leaves([None if x is None else mode.from_tensor(x) for x in fake.leaves()])
        assert prover.choose(fake) == "fast"
        knows(cache, "Right")
        assert prover.choose(fake) == "Right"  # proved, though not timed
        knows(cache, "Right", Right=3.0, fast=2.0)
        assert prover_of("Right").choose(fake) == "fast"


def test_the_program_is_left_as_it_was(monkeypatch):
    monkeypatch.setenv("IRPE_TUNE", "off")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    call = call_of()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        prover_of("Right").choose(call)
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_compiler_sees_what_is_known(is_dynamic, cache, monkeypatch):
    forbid_proofs(monkeypatch)
    prover, call = prover_of("Right"), call_of()

    def compute(call):
        return call.q * (2 if prover.choose(call) == "Right" else 1)

    for factor in (1, 2):
        torch._dynamo.reset()
        compiled = torch.compile(compute, backend="aot_eager", fullgraph=True, dynamic=is_dynamic)
        assert torch.equal(compiled(call), call.q * factor)
        assert list(prover.choices.values()) == ["Right" if factor == 2 else "fast"]
        knows(cache, "Right")


def test_a_model_is_prepared_and_left_as_it_was(cache):
    """Two sizes of attention, in training and evaluation: four signatures and size classes."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(16)
            self.drop = nn.Dropout()

        def forward(self, images):
            x = self.drop(self.norm(images))
            for grid in ((7, 14), (3, 5)):
                call = call_of(grid, training=torch.is_grad_enabled())
                assert prover.choose(call) == "fast"  # nothing is proved while it runs
            return x

    prover, model = prover_of("Right", "WrongGradient"), Model().eval()
    torch.manual_seed(0)
    before, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="WrongGradient is not used") as warned:
        found = prepare_model(prover, model, torch.randn(8, 16, generator=torch.Generator()))
    assert len(warned) == 1  # of training at both sizes; a forward pass alone is right
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert not model.training
    assert len(found.choices) == 4
    for call, name in found.choices.items():
        assert name != "WrongGradient" or "inference" in call
        assert "proved on cpu" in found.known[call]["Right"]
    forbidden = pytest.MonkeyPatch()
    forbid_proofs(forbidden)
    assert prover_of("Right").choose(call_of()) in ("Right", "fast")
    forbidden.undo()
    assert str(found).splitlines()[1].startswith("  Right: proved on cpu")
    nothing = prepare_model(prover, nn.Linear(2, 2), torch.zeros(1, 2))
    assert str(nothing) == "nothing to prove: no call of this model has a candidate on its device"


RANKS = """
import subprocess, sys
sys.path[:0] = {paths!r}
import torch.distributed as dist
from signatures import call_of, prover_of
dist.init_process_group("gloo")
started, popen = [], subprocess.Popen
subprocess.Popen = lambda *a, **k: started.append(1) or popen(*a, **k)
name = prover_of("Right", "Slow").choose(call_of())
found = [None] * 2
dist.all_gather_object(found, (len(started), name))
if dist.get_rank() == 0:
    print("found", sorted(n for n, _ in found), len({{name for _, name in found}}))
dist.destroy_process_group()
"""


def test_ranks_prove_once_and_choose_the_same(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(paths=sys.path))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--master_addr=127.0.0.1", "--master_port=0", "--rdzv_backend=c10d"]
    command += ["--rdzv_endpoint=127.0.0.1:0", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "found [0, 1] 1" in done.stdout


def test_proofs_need_little_memory():
    """Less than 50 MB beside what PyTorch itself takes, for the largest signature."""
    large = CROSS._replace(dim=128, query="heads", key="heads", value="heads", maps="2", bits=8)
    assert peak_memory(lambda: judge(planted.Right, large, CPU)) < 50e6


def test_proofs_and_timings_run_a_candidate_a_few_times():
    """Two small problems, each twice for the same bits; once to compile, then seven times."""
    calls = []

    class Counted(planted.Right):
        @staticmethod
        def attention(call):
            calls.append(call.q.shape[2])
            return planted.Right.attention(call)

    assert judge(Counted, K, CPU).error == ""
    assert calls == [73, 73, 13, 13]
    calls.clear()
    seconds_of(Counted, small_problems(K, CPU)[1])
    assert 2 <= len(calls) <= 8
