"""SmolLM2 as AWQ, packed after the published format: small, and right.

The quick tests have weights rounded to nearest, the slow ones weights rounded by calibration.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inferq import LLM, SamplingParams
from inferq.kernels.attention import AttentionBatch
from inferq.kernels.matmul import Weight, pack_float
from inferq.kernels.matmul_int4 import dequantize_int4
from inferq.protocol.errors import ModelError
from inferq.protocol.prompts import ChatMessage
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.architecture import quantized_weight
from inferq.worker.model.architecture.causal_model import StepTensors
from inferq.worker.model.architecture.transformer import Decoder
from inferq.worker.model.loading.loader import load_weights
from inferq.worker.model.loading.model_loading import load_model, read_model_config
from inferq.worker.model.loading.model_store import cache_root
from inferq.worker.model.running.kv_cache import KVCacheShape

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
calibrated = [pytest.mark.slow, pytest.mark.timeout(1800)]

CPU = torch.device("cpu")
GROUP = 64
#: Questions, and openings of texts of many kinds: none of them is in the greedy cases.
BEGINNINGS = Path(__file__).parent / "awq_texts.json"
#: Of the texts by which weights are rounded: each in tokens, and those after one random token.
TEXT_LENGTH, RANDOM_TEXTS = 128, 16
#: Of SmolLM2, before which special ones stand.
FIRST_PLAIN_TOKEN, VOCAB_SIZE = 17, 49152
NAME = "model.safetensors"
#: What calibrated weights may cost: two thirds of what those rounded to nearest do, which move
#: logits by 0.36 of their spread and change the best token at 32 % of positions.
FAR, MOST_AGREEMENT_LOST = 0.24, 0.21
#: In nats; of weights rounded to nearest 0.44.
MOST_DIVERGENCE = 0.22
#: A choice is clear if its two best logits lie apart by more than this many times what rounding
#: typically (root mean square over all positions) moves them apart or together.
CLEAR = 2.0
#: Of the number of choices that turn, the standard deviations by which it may exceed the expected.
MOST_LUCK = 3.0
#: Logprobs that lie closer than this are as good as each other.
CLOSE = 0.05
#: What the product's rounding of activations to 8 bits moves logits, relative to their spread.
PRODUCT_FAR = 0.08
#: And what it costs, in nats.
PRODUCT_DIVERGENCE = 0.02


@pytest.fixture(scope="module")
def nearest(smollm2: Path, awq_packing: ModuleType, tmp_path_factory: Any) -> Path:
    """SmolLM2 with its projections as AWQ, each weight rounded to the nearest value."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(smollm2 / NAME).items():
        if name.endswith("_proj.weight"):
            packed = awq_packing.pack_awq(tensor, GROUP)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{kind}": part for kind, part in asdict(packed).items()}
        else:
            tensors[name] = tensor.half()
    folder: Path = tmp_path_factory.mktemp("nearest") / "smollm2"
    write_awq(smollm2, tensors, folder)
    return folder


@pytest.fixture(scope="module")
def awq(smollm2: Path, awq_packing: ModuleType, awq_calibration: ModuleType) -> Path:
    """SmolLM2 with its projections as AWQ, calibrated, and the rest in float16.

    It is made once, in minutes, and kept in the cache for as long as what makes it is the same.
    """
    makers = [Path(module.__file__ or "") for module in (awq_packing, awq_calibration)]
    makers += [BEGINNINGS]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in makers)).hexdigest()
    folder = cache_root() / "tests" / f"smollm2-awq-{GROUP}-{TEXT_LENGTH}-{digest[:16]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            texts = calibration_texts(smollm2)
            rounded = awq_calibration.quantized_llama(smollm2, texts, GROUP)
            write_awq(
                smollm2, awq_tensors(smollm2, dict(rounded), awq_packing), Path(work) / "made"
            )
            try:
                (Path(work) / "made").rename(folder)
            except OSError:
                if not folder.is_dir():  # another process's is as good
                    raise
    return folder


def calibration_texts(model: Path) -> list[list[int]]:
    """Return what the plain model says: in chats, after openings, and after any one token.

    The first token of a text is a special one to attention, whichever it is.
    """
    beginnings = json.loads(BEGINNINGS.read_text())
    llm = LLM(str(model), max_model_len=TEXT_LENGTH, num_kv_blocks=1024)
    tokenizer, chosen = llm.get_tokenizer(), random.Random(0)
    starts = [tokenizer.render_chat([ChatMessage("user", x)]) for x in beginnings["questions"]]
    starts += [tokenizer.encode(opening) for opening in beginnings["openings"]]
    starts += [[chosen.randrange(FIRST_PLAIN_TOKEN, VOCAB_SIZE)] for _ in range(RANDOM_TEXTS)]
    sampling = [
        SamplingParams(
            temperature=0.7 if len(start) > 1 else 1.0,
            seed=seed,
            max_tokens=TEXT_LENGTH - len(start),
            ignore_eos=True,
        )
        for seed, start in enumerate(starts)
    ]
    prompts = [{"prompt_token_ids": start} for start in starts]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    pairs = zip(starts, outputs, strict=True)
    return [[*start, *output.outputs[0].token_ids] for start, output in pairs]


def awq_tensors(
    source: Path, rounded: dict[str, Any], awq_packing: ModuleType
) -> dict[str, Tensor]:
    """Return the model's tensors with the projections in `rounded` as AutoAWQ names them."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / NAME).items():
        module = name.removesuffix(".weight")
        if (parts := rounded.get(module)) is None:
            tensors[name] = tensor.half()
            continue
        packed = awq_packing.pack_awq_values(parts.values.T, parts.zeros.T, parts.scales.T.half())
        tensors |= {f"{module}.{kind}": part for kind, part in asdict(packed).items()}
    return tensors


def write_awq(source: Path, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the model with these tensors as AutoAWQ writes it."""
    folder.mkdir()
    for path in source.glob("*.json"):
        shutil.copy(path, folder)
    save_file(tensors, folder / NAME)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float16"
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    (folder / "config.json").write_text(json.dumps(config))


def load(folder: Path, dtype: torch.dtype) -> Decoder:
    decoder = load_model(
        folder,
        read_model_config(folder),
        EngineConfig(model=str(folder)),
        max_model_len=1024,
        dtype=dtype,
        device=CPU,
        load=load_weights,
    )
    assert isinstance(decoder, Decoder)
    return decoder


@torch.inference_mode()
def logits(decoder: Decoder, dtype: torch.dtype, token_ids: list[int]) -> Tensor:
    """Return the logits [T, vocab_size] of a text that is computed at once."""
    count, block_size = len(token_ids), 16
    blocks = -(-count // block_size)
    cache = KVCacheShape.of(decoder.config, block_size, dtype).allocate(blocks, CPU)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(count),
        num_decodes=0,
        query_lens=(count,),
        context_lens=(0,),
        block_size=block_size,
    )
    positions = torch.arange(count)
    step = StepTensors(torch.tensor(token_ids), positions, batch, positions)
    return decoder.logits(decoder.hidden(step, cache)).float()


def distances(result: Tensor, expected: Tensor) -> Tensor:
    """Return each row's difference, relative to the spread of its logits: an offset is none."""
    result, expected = (x - x.mean(dim=1, keepdim=True) for x in (result, expected))
    return (result - expected).norm(dim=1) / expected.norm(dim=1)


@dataclass(frozen=True)
class Comparison:
    """The logits of all cases' positions beside others'."""

    result: list[Tensor]
    expected: list[Tensor]

    @property
    def distance(self) -> float:
        """The median position's."""
        pairs = zip(self.result, self.expected, strict=True)
        return float(torch.cat([distances(*pair) for pair in pairs]).median())

    @property
    def agreement(self) -> float:
        """The share of positions with the same best token."""
        pairs = zip(self.result, self.expected, strict=True)
        return float(torch.cat([a.argmax(1) == b.argmax(1) for a, b in pairs]).float().mean())

    @property
    def divergence(self) -> float:
        """What the result tells less of the next token, in nats: Kullback and Leibler's, mean."""
        pairs = zip(self.result, self.expected, strict=True)
        return float(torch.cat([divergences(*pair) for pair in pairs]).mean())

    @property
    def gap_error(self) -> float:
        """What the gap between the two best logits is off by: the root of its mean square."""
        pairs = zip(self.result, self.expected, strict=True)
        return float(torch.cat([gap_errors(*pair) for pair in pairs]).square().mean().sqrt())


def divergences(result: Tensor, expected: Tensor) -> Tensor:
    """Return each row's divergence of the result's distribution from the expected one."""
    found, known = result.log_softmax(dim=1), expected.log_softmax(dim=1)
    return (known.exp() * (known - found)).sum(dim=1)


def gap_errors(result: Tensor, expected: Tensor) -> Tensor:
    """Return by how much each row's gap between the two best expected logits differs."""
    best = expected.topk(2, dim=1)
    gaps = [x[:, 0] - x[:, 1] for x in (result.gather(1, best.indices), best.values)]
    return gaps[0] - gaps[1]


def all_logits(folder: Path, dtype: torch.dtype, cases: list[Any]) -> list[Tensor]:
    decoder = load(folder, dtype)
    return [logits(decoder, dtype, case.prompt_token_ids + case.token_ids[:-1]) for case in cases]


@pytest.fixture(scope="module")
def plain(smollm2: Path, greedy_cases: list[Any]) -> list[Tensor]:
    """Logits of the whole weights."""
    return all_logits(smollm2, torch.float32, greedy_cases)


@pytest.fixture(scope="module")
def exact(awq: Path, greedy_cases: list[Any]) -> list[Tensor]:
    return exact_logits(awq, greedy_cases)


def exact_logits(folder: Path, cases: list[Any]) -> list[Tensor]:
    """Return the logits of the rounded weights, multiplied in float32."""

    def whole(*weight: Any) -> Weight:
        return pack_float(dequantize_int4(*weight[:4]), weight[4])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_weight, "pack_int4", whole)
        return all_logits(folder, torch.float32, cases)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_close_to_those_of_the_rounded_weights(
    nearest: Path, greedy_cases: list[Any], dtype: torch.dtype
) -> None:
    cases = [case for case in greedy_cases if case.name in {"capital", "thirty-two"}]
    result = all_logits(nearest, dtype, cases)
    comparison = Comparison(result, exact_logits(nearest, cases))
    assert comparison.distance < PRODUCT_FAR
    assert comparison.divergence < PRODUCT_DIVERGENCE
    assert comparison.agreement > 0.85


def test_the_clearest_first_token_stays_with_weights_rounded_to_nearest(
    nearest: Path, greedy_cases: list[Any]
) -> None:
    clearest = max(greedy_cases, key=lambda case: case.top2_gap[0])
    assert first_tokens(nearest, [clearest]) == [clearest.token_ids[0]]


def test_weights_take_a_quarter_of_the_memory(nearest: Path, smollm2: Path) -> None:
    decoder, whole = load(nearest, torch.float32), load(smollm2, torch.float32)
    products = [
        sum(linear.nbytes for layer in model.layers for linear in layer.linears)
        for model in (decoder, whole)
    ]
    # Half a byte for each weight; for each group of 64 a float32 scale and a byte of zero.
    assert products[0] / products[1] == pytest.approx((0.5 + 5 / GROUP) / 4, rel=1e-3)
    # With head and embedding, which are one and stay in float16.
    sizes = [model.description.weight_bytes for model in (decoder, whole)]
    assert sizes[0] < sizes[1] / 4


def test_what_the_checkpoint_is_not_is_refused(nearest: Path, smollm2: Path) -> None:
    with pytest.raises(ModelError, match=r"int8 was asked for, but the .* weights are awq already"):
        LLM(str(nearest), quantization="int8")
    with pytest.raises(ModelError, match="awq was asked for, but the checkpoint's weights are not"):
        LLM(str(smollm2), quantization="awq")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_ranks_give_the_tokens_of_one(nearest: Path, greedy_cases: list[Any]) -> None:
    cases = sorted(greedy_cases, key=lambda case: len(case.prompt_token_ids))[:6]
    prompts = [{"prompt_token_ids": case.prompt_token_ids} for case in cases]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
    found = []
    for size in (1, 3):
        llm = LLM(str(nearest), tensor_parallel_size=size, num_kv_blocks=64, max_model_len=512)
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        found.append([output.outputs[0] for output in outputs])
        del llm
    compared = 0
    for one, three in zip(*found, strict=True):
        assert one.logprobs is not None
        tops = [sorted((x.logprob for x in each.values()), reverse=True) for each in one.logprobs]
        # Sums in another order may change a choice between two that are as good.
        clear = next((i for i, top in enumerate(tops) if top[0] - top[1] < CLOSE), len(tops))
        assert three.token_ids[:clear] == one.token_ids[:clear]
        compared += clear
    assert compared >= 24


class TestCalibrated:
    """The packing takes some 150 seconds of processor time, once."""

    pytestmark = calibrated

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_logits_are_close_to_the_whole_weights_and_closer_to_the_rounded_ones(
        self,
        awq: Path,
        plain: list[Tensor],
        exact: list[Tensor],
        greedy_cases: list[Any],
        dtype: torch.dtype,
    ) -> None:
        ours = all_logits(awq, dtype, greedy_cases)
        packing = Comparison(exact, plain)
        assert packing.distance < FAR, "the packer's own error"
        assert packing.divergence < MOST_DIVERGENCE
        assert packing.agreement > 1 - MOST_AGREEMENT_LOST
        rounding = Comparison(ours, exact)
        assert rounding.distance < packing.distance / 3, "activations in 8 bits"
        assert rounding.divergence < PRODUCT_DIVERGENCE
        assert rounding.agreement > 0.9
        both = Comparison(ours, plain)
        assert both.distance < 1.06 * packing.distance
        assert both.divergence < packing.divergence + PRODUCT_DIVERGENCE
        assert both.agreement > packing.agreement - 0.02

    def test_answers_begin_like_those_of_the_whole_weights(
        self, awq: Path, plain: list[Tensor], exact: list[Tensor], greedy_cases: list[Any]
    ) -> None:
        """Where the choice is clear; of the others as many as such a packing is expected to turn.

        Which ones is luck: it changes with the last bits of the texts that the packer is shown.
        """
        moved = Comparison(exact, plain).gap_error
        others = {
            case.name: case.top2_gap[0]
            for case, token in zip(greedy_cases, first_tokens(awq, greedy_cases), strict=True)
            if token != case.token_ids[0]
        }
        assert {name for name, gap in others.items() if gap > CLEAR * moved} == set()
        chances = [math.erfc(case.top2_gap[0] / moved / 2**0.5) / 2 for case in greedy_cases]
        spread = sum(chance * (1 - chance) for chance in chances) ** 0.5
        print(f"gaps move by {moved:.2f}, {sum(chances):.1f} tokens should turn; {others} do")
        assert len(others) <= sum(chances) + MOST_LUCK * spread


def first_tokens(folder: Path, cases: list[Any]) -> list[int]:
    llm = LLM(str(folder), quantization="awq", max_model_len=1024, num_kv_blocks=256)
    outputs = llm.generate(
        [{"prompt_token_ids": case.prompt_token_ids} for case in cases],
        SamplingParams(temperature=0.0, max_tokens=1),
        use_tqdm=False,
    )
    return [output.outputs[0].token_ids[0] for output in outputs]
