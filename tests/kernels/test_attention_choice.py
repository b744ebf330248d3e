import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from inferq.kernels.attention import attention_ops
from inferq.kernels.cpu_attention import CpuAttention
from inferq.kernels.native.library import load_native

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def test_the_cpu_gets_the_native_form_where_it_can_be_compiled(monkeypatch):
    monkeypatch.setattr("inferq.kernels.attention.load_native", lambda: None)
    assert attention_ops(CPU).name == "torch"
    assert attention_ops(CPU, "cpu").name == "torch"
    with pytest.raises(ValueError, match="'native' cannot run: the native kernels are not"):
        attention_ops(CPU, "native")
    monkeypatch.undo()
    if load_native() is not None:
        assert attention_ops(CPU).name == "native"


def test_the_log_says_which_form_it_is(caplog):
    with caplog.at_level(logging.DEBUG, logger="inferq.kernels.attention"):
        attention_ops(CPU, "torch")
    assert "attention on cpu: torch (SDPA over gathered pages" in caplog.text


def test_the_reference_can_be_asked_for():
    assert attention_ops(CPU, "reference").name == "reference"


@pytest.mark.parametrize("name", ["cpu", "native", "torch"])
def test_a_form_that_cannot_run_on_the_device_is_refused(name):
    with pytest.raises(ValueError, match=f"'{name}' cannot run on cuda"):
        attention_ops(CUDA, name)


def test_triton_is_refused_on_the_cpu():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="'triton' cannot run on cpu"):
        attention_ops(CPU, "triton")


def test_triton_without_triton_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "inferq.kernels.triton_attention", raising=False)
    with pytest.raises(ValueError, match="triton is not installed"):
        attention_ops(CUDA, "triton")


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="'cuda-graphs' is unknown"):
        attention_ops(CPU, "cuda-graphs")


def test_the_cpu_forms_do_not_import_triton():
    code = (
        "import sys, torch\n"
        "sys.modules['triton'] = None\n"
        "from inferq.kernels.attention import attention_ops\n"
        "from inferq.kernels import activation, gumbel, norm, rotary\n"
        "print(attention_ops(torch.device('cpu'), 'torch').name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "torch"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_lens": (5,)}, "query_lens, context_lens and seq_lens disagree"),
        ({"query_starts": torch.tensor([0, 1], dtype=torch.int32)}, "query_starts"),
        ({"num_decodes": 2}, "the first 2 sequences must have one query token"),
        ({"max_seq_len": 17}, "max_seq_len 17 does not fit block_tables"),
        ({"max_seq_len": 5}, "max_seq_len is 5, but a sequence has 6"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(make_case, changes, message):
    batch = make_case([(5, 1), (0, 3)]).batch
    with pytest.raises(ValueError, match=message):
        replace(batch, **changes)


@pytest.mark.parametrize(
    ("shape", "cache", "message"),
    [
        ((1, 4, 80), (3, 2, 16, 2, 64), "head_dim is 80 in the query, 64 in the cache"),
        ((1, 5, 64), (3, 2, 16, 2, 64), "5 query heads are no multiple of 2 KV heads"),
        ((1, 4, 64), (3, 2, 32, 2, 64), "block_size is 16 in the batch, 32 in the cache"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(make_case, shape, cache, message):
    ops = CpuAttention()
    plan = ops.plan(make_case([(5, 1)]).batch)
    with pytest.raises(ValueError, match=message):
        ops.attend(torch.zeros(shape), torch.zeros(cache), plan, scale=1.0)
