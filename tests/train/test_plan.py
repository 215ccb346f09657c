"""How the batch of a step is split, and what is said of few steps."""

import pytest
from train.little import CONFIG

from irpe.errors import UserError
from irpe.train.processes import plan_batches


@pytest.mark.parametrize(
    ("batch_size", "count", "processes", "steps", "better"),
    [(128, 192, 1, 1, 16), (64, 192, 1, 3, 16), (64, 192, 2, 3, 16), (120, 192, 3, 1, 12),
     (2, 9, 1, 4, None), (128, 1290, 1, 10, None)],
)  # fmt: skip
def test_few_steps_are_told_with_a_batch_size_that_gives_more(
    batch_size, count, processes, steps, better
):
    plan = plan_batches(CONFIG.replace(batch_size=batch_size), count, processes)
    assert plan.steps == steps
    assert (plan.note is not None) == (better is not None)
    assert better is None or f"--batch-size {better} gives {count // better}" in plan.note


def test_a_batch_is_split_evenly():
    config = CONFIG.replace(batch_size=12, device_batch_size=2)
    assert plan_batches(config, 48, 2)[:3] == (2, 3, 4)
    for batch_size, processes, said in ((12, 5, "a multiple of"), (64, 1, "such as 4")):
        with pytest.raises(UserError, match=f"batch_size = {batch_size}.*{said}"):
            plan_batches(config.replace(batch_size=batch_size), 48, processes)
