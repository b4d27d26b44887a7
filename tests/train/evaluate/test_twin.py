"""Our export scores the same in the harness's own backend for transformers."""

import jax
import pytest

from tests.train.evaluate.task_files import NAMES, write_tasks
from tests.train.pretrained.conftest import perturbed
from train.pretrained.folder import require_empty_folder, write_folder

pytestmark = pytest.mark.slow

MODEL = ("model=llama_nano", "model.num_layers=2", "data.sequence_length=64")


@pytest.mark.parametrize("num_fewshot", [0, 1])
def test_both_give_the_same_answers_to_each_example(
    programs, store, tmp_path, num_fewshot
):
    for name in ("torch", "transformers", "lm_eval"):
        pytest.importorskip(name)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from train.evaluate.harness import HarnessModel

    program = programs(MODEL, devices=1)
    params = perturbed(program.config.model)
    folder = require_empty_folder(str(tmp_path / "exported"))
    write_folder(folder, program, params, store, 0, "float32", True)
    ours = HarnessModel(program, store.encoding)
    ours.params = jax.device_put(params, program.shardings.params)
    theirs = HFLM(str(folder), device="cpu", dtype="float32", batch_size=1)
    path = write_tasks(tmp_path / "tasks")
    our_results, their_results = (
        simple_evaluate(
            model,
            tasks=NAMES,
            num_fewshot=num_fewshot,
            task_manager=TaskManager(include_path=path, include_defaults=False),
            bootstrap_iters=10,
        )
        for model in (ours, theirs)
    )
    for name in NAMES:
        our_rows = {row["doc_id"]: row for row in our_results["samples"][name]}
        assert len(our_rows) == len(their_results["samples"][name]) > 5
        for row in their_results["samples"][name]:
            responses = our_rows[row["doc_id"]]["resps"]
            for our_response, their_response in zip(
                responses, row["resps"], strict=True
            ):
                check_equal(our_response[0], their_response[0])
        for key, value in their_results["results"][name].items():
            if isinstance(value, float):
                assert our_results["results"][name][key] == pytest.approx(
                    value, rel=1e-4
                )


def check_equal(ours, theirs) -> None:
    if isinstance(ours, tuple):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
        assert ours[1] is theirs[1]
    else:
        assert ours == (theirs if isinstance(theirs, str) else pytest.approx(theirs))
