"""A kernel whose results differ from the plain formula is named."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import pytest

from model.attention import xla
from model.choices import Attention, Grouped, Norm
from model.execution import Execution
from model.parts.attention import KernelAttention
from model.parts.context.context_parallel import KERNELS
from model.parts.experts import grouped
from model.parts.kernels import norm_triton
from train.config import MESH_AXES, Config
from train.errors import NOT_PROVED, Exit
from train.prove.kernels import check_kernels, compare_kernels
from train.resolve.execution import ExecutionChoice

MODEL = (
    *("model=gpt_oss_nano", "model.window=16", "data.sequence_length=128"),
    *("model.compute_dtype=bfloat16", "model.embed_dim=32", "model.expert_dim=24"),
)


class Case(NamedTuple):
    config: Config
    execution: Execution


@pytest.fixture
def case(configure, monkeypatch) -> Case:
    """Return a config with windows, sinks and experts, and its execution."""
    use_kernel(monkeypatch, xla.attend)
    config = configure(MODEL)
    sizes = dict.fromkeys(MESH_AXES, 1)
    execution = ExecutionChoice(config, jax.devices()[0], sizes).execution()
    attention = KernelAttention(Attention.cudnn)
    execution = execution._replace(attention=attention, grouped=Grouped.ragged)
    return Case(config, execution)


def wrong_parts(case):
    config, execution = case
    differences = compare_kernels(config.model, config.data, execution)
    return {d.key.name.split(": ")[1] for d in differences if d.is_wrong}


def use_kernel(monkeypatch, attend):
    kernel = SimpleNamespace(attend=attend, SCALES_QUERIES=True)
    monkeypatch.setitem(KERNELS, Attention.cudnn, kernel)


def test_right_kernels_agree_in_bfloat16(case):
    config, execution = case
    differences = compare_kernels(config.model, config.data, execution)
    assert not any(difference.is_wrong for difference in differences)
    # The result and four gradients, with and without a window; two products, each with
    # a result and two gradients.
    assert len(differences) == 2 * 5 + 2 * 3
    assert all(difference.error > 0 for difference in differences)
    assert check_kernels(case.config.model, case.config.data, case.execution) == {}


def test_values_of_latent_attention_have_their_own_dim(configure, case):
    _, execution = case
    config = configure(["model=deepseek_v3_nano", "model.value_head_dim=24"])
    differences = compare_kernels(config.model, config.data, execution)
    assert not any(difference.is_wrong for difference in differences)


def test_a_window_that_is_too_long_is_found(case, monkeypatch):
    def attend(inputs, *, window, soft_cap):
        window = window and window + 1
        return xla.attend(inputs, window=window, soft_cap=soft_cap)

    use_kernel(monkeypatch, attend)
    with pytest.raises(Exit, match="window 16: result") as error:
        check_kernels(case.config.model, case.config.data, case.execution)
    assert error.value.code == NOT_PROVED
    assert "window none" not in str(error.value)


def test_documents_that_see_each_other_are_found(case, monkeypatch):
    def attend(inputs, *, window, soft_cap):
        inputs = inputs._replace(segment_ids_BS=None)
        return xla.attend(inputs, window=window, soft_cap=soft_cap)

    use_kernel(monkeypatch, attend)
    assert "result" in wrong_parts(case)


def test_a_wrong_gradient_alone_is_found(case, monkeypatch):
    def attend(inputs, *, window, soft_cap):
        k = inputs.k_BSKH
        half = 0.5 * k + 0.5 * jax.lax.stop_gradient(k)
        inputs = inputs._replace(k_BSKH=half)
        return xla.attend(inputs, window=window, soft_cap=soft_cap)

    use_kernel(monkeypatch, attend)
    assert wrong_parts(case) == {"gradient of keys"}


def test_wrong_products_of_experts_are_found(case, monkeypatch):
    def product(*args, **options):
        return 1.1 * jax.lax.ragged_dot_general(*args, **options)

    monkeypatch.setattr(grouped, "ragged_dot_general", product)
    jax.clear_caches()
    assert wrong_parts(case) == {"result", "gradient of rows", "gradient of matrices"}
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.parametrize("norm", Norm)
def test_a_wrong_norm_is_found(case, norm):
    model = replace(case.config.model, norm=norm, bias=True)
    right = partial(norm_triton.normalize, interpret=True)

    def forgets_the_residual(x, *args):
        kept, y = right(x, *args)
        return jax.lax.stop_gradient(kept), y

    for kernel, is_wrong in ((right, False), (forgets_the_residual, True)):
        execution = case.execution._replace(normalize=kernel)
        differences = compare_kernels(model, case.config.data, execution)
        norms = [d for d in differences if d.key.name.startswith("norm of 32 dims")]
        assert norms
        assert any(d.is_wrong for d in norms) is is_wrong
