"""The trainer's forward pass: logits and logprobs of token sequences, with the engine's bits.

`lockstep train`, the Tinker API, TRL and `exact.token_logprobs` all use it. A prepared model
(`exact.prepare`) on a CPU gets all sequences packed into one row without padding, in which every
beginning that several sequences share is computed once. Any other model gets one padded row per
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.engine.model.arithmetic import round_up
from lockstep.engine.numerics.block_shapes import MULTIPLES, Products, products, row_multiple
from lockstep.engine.numerics.packing import PackedRow, pack
from lockstep.engine.processing import process_spans
from lockstep.engine.text.grammars import Grammars
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.shaping import ShapedSpan
from lockstep.tokens.support import Support

ATTENTION_NAME = "lockstep_exact"
"""The name under which transformers knows the attention of a prepared model."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Token sequences arranged for one forward pass.

    `ids` holds the tokens of all rows, one row after another. `places[i]` are the indices in `ids`
    of the tokens of sequence i. `packed` is None for a batch with one padded row per sequence.
    """

    ids: Tensor
    places: tuple[Ints, ...]
    packed: PackedRow | None

    @classmethod
    def arrange(
        cls,
        model: Any,
        sequences: Sequence[Sequence[int]],
        *,
        share: bool = True,
        multiple: int | None = None,
    ) -> TokenRows:
        """Pack the sequences where the model allows it, else pad them to one length.

        Packed sequences share their equal beginnings unless `share` is false. Rows are padded to a
        multiple of `multiple`, by default the model's own.
        """
        if multiple is None:
            multiple = row_multiple_of(model)
        if packs(model):
            row = pack(sequences, share=share, multiple=multiple)
            return cls(row.ids_T, row.tokens_of, row)
        width = round_up(max(map(len, sequences)), multiple)
        rows = np.zeros((len(sequences), width), dtype=np.int64)
        for at, tokens in enumerate(sequences):
            rows[at, : len(tokens)] = tokens
        places = tuple(at * width + np.arange(len(ids)) for at, ids in enumerate(sequences))
        return cls(torch.from_numpy(rows.reshape(-1)).to(model.device), places, None)

    @property
    def width(self) -> int | None:
        """Tokens of one padded row; None where the sequences are packed."""
        return None if self.packed is not None else len(self.ids) // len(self.places)

    def select(self, positions: Sequence[Ints]) -> Tensor:
        """Return the indices in `ids` of the tokens at `positions[i]` of every sequence i, flat."""
        pairs = zip(self.places, positions, strict=True)
        return torch.from_numpy(np.concatenate([own[at] for own, at in pairs])).to(self.ids.device)

    def logits(self, model: Any, rows_N: Tensor | None = None) -> Tensor:
        """Return the logits (N, vocab) of the tokens `rows_N` of `ids`, by default of all."""
        if self.packed is None:
            ids_BT = self.ids.view(len(self.places), -1)
            logits_NV: Tensor = model(input_ids=ids_BT, use_cache=False).logits.flatten(0, 1)
            return logits_NV if rows_N is None else logits_NV[rows_N]
        # The head of a large vocabulary dominates a pass: compute it only where it is needed.
        keep = {} if rows_N is None else {"logits_to_keep": rows_N}
        packed: Tensor = model(**self.packed.arguments(), **keep).logits[0]
        return packed


def token_logits(model: Any, rows: TokenRows, positions: Sequence[Ints]) -> tuple[Tensor, Tensor]:
    """Return the logits (N, vocab) that predict the tokens at `positions`, and those tokens (N,).

    `positions[i]` are indices into sequence i. Position 0 has no prediction and is not allowed.
    """
    before_N = rows.select([at - 1 for at in positions])
    return rows.logits(model, before_N), rows.ids[rows.select(positions)]


def token_logprobs(
    model: Any, token_ids: Sequence[int] | Sequence[Sequence[int]], temperature: float = 1.0
) -> Tensor | list[Tensor]:
    """Return the logprob of each token after the first, given the tokens before it.

    One sequence gives a tensor of length len - 1, several sequences give a list of such tensors. A
    `temperature` other than 1 gives the logprobs that the engine reports in `processed` mode.
    Raises BadRequest for an empty sequence.
    """
    if not token_ids:
        raise BadRequest("token_ids is empty: at least one sequence is needed", param="token_ids")
    if isinstance(token_ids[0], int):
        return _batch_logprobs(model, [list(token_ids)], temperature)[0]  # type: ignore[arg-type]
    return _batch_logprobs(model, [list(ids) for ids in token_ids], temperature)  # type: ignore[arg-type]


def _batch_logprobs(model: Any, sequences: list[list[int]], temperature: float) -> list[Tensor]:
    for at, ids in enumerate(sequences):
        if not ids:
            raise BadRequest(f"token_ids[{at}] is empty", param=f"token_ids[{at}]")
    positions = [np.arange(1, len(ids)) for ids in sequences]
    logits_NV, ids_N = token_logits(model, TokenRows.arrange(model, sequences), positions)
    logprobs_N = chosen_logprobs(logits_NV, ids_N, temperature)
    return list(logprobs_N.split([len(ids) - 1 for ids in sequences]))


def sample_logprobs(
    model: Any, samples: Sequence[Sample], grammars: Grammars | None = None
) -> list[Tensor]:
    """Return the logprob of each token after the first of each sample, in the sample's own mode.

    For sampled tokens these are the numbers that the engine reports, bit for bit where `model` is
    prepared (`exact.prepare`), at any temperature and with any option that shaped the distribution.
    Logprobs are normalised over the support that the sample records. Without one, the options
    select tokens again under these weights: a token that could not be drawn now has -inf, and
    samples that were constrained by a grammar need `grammars` (`Grammars.of` the model's
    directory), else BadRequest is raised. Gradients flow.
    """
    return [_sample_logprobs(model, sample, grammars) for sample in samples]


def _sample_logprobs(model: Any, sample: Sample, grammars: Grammars | None) -> Tensor:
    positions = [np.arange(1, len(sample.token_ids))]
    rows = TokenRows.arrange(model, [sample.token_ids])
    logits_NV, ids_N = token_logits(model, rows, positions)
    if sample.logprob_mode == "processed":
        logits_NV = process_spans(
            logits_NV.float(), sample.token_ids, sample.shaping, sample.temperature,
            grammars=grammars, support=sample.support,
        )  # fmt: skip
    logprobs_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    return logprobs_NV.gather(-1, ids_N[:, None]).squeeze(-1)


def shaped_logits(
    logits_NV: Tensor,
    positions: Ints,
    token_ids: Sequence[int],
    spans: Sequence[ShapedSpan],
    temperature: float,
    *,
    grammars: Grammars | None = None,
    support: Support | None = None,
) -> Tensor:
    """Return the logits of the distributions that the tokens at `positions` were drawn from.

    `logits_NV` predict these tokens. `spans` and `support` are those of the whole sequence.
    """
    at = torch.from_numpy(positions - 1).to(logits_NV.device)
    whole_TV = logits_NV.new_zeros(len(token_ids) - 1, logits_NV.shape[-1])
    processed_TV = process_spans(
        whole_TV.index_copy(0, at, logits_NV), token_ids, spans, temperature,
        grammars=grammars, support=support,
    )  # fmt: skip
    return processed_TV[at]


def target_logprobs(
    model: Any,
    sequences: Sequence[Sequence[int]],
    targets: Sequence[Tensor],
    *,
    multiple: int | None = None,
) -> list[Tensor]:
    """Return the logprob of every target, in the shapes of `targets`.

    `targets[i]` has one row for each token of sequence i: the id to score after that token (N,), or
    K alternatives (N, K). `multiple` is that of `TokenRows.arrange`.
    """
    rows = TokenRows.arrange(model, sequences, multiple=multiple)
    logits_RV = rows.logits(model)
    depths = [target.numel() // len(ids) for target, ids in zip(targets, sequences, strict=True)]
    pairs = list(zip(rows.places, depths, strict=True))
    row_N = np.concatenate([np.repeat(own, depth) for own, depth in pairs])
    at_N = torch.from_numpy(row_N).to(logits_RV.device)
    ids_N = torch.cat([target.reshape(-1) for target in targets])
    # Indexed once for all sequences: every indexing of the logprobs costs a gradient of their size.
    if logits_RV.is_cuda:
        column_N = np.concatenate([np.tile(np.arange(depth), len(own)) for own, depth in pairs])
        columns = torch.from_numpy(column_N).to(logits_RV.device)
        ids_RK = ids_N.new_zeros(len(logits_RV), max(depths))
        ids_RK[at_N, columns] = ids_N
        chosen_RK = [chosen_logprobs(logits_RV, ids_R) for ids_R in ids_RK.unbind(-1)]
        logprobs_N = torch.stack(chosen_RK, dim=-1)[at_N, columns]
    else:
        logprobs_N = torch.log_softmax(logits_RV.float(), dim=-1)[at_N, ids_N]
    parts = logprobs_N.split([target.numel() for target in targets])
    return [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]


def chosen_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the logprob of each token under logits (..., vocab) of the model's own type.

    Differentiable, and computed by the same sums as in the engine on that device, where nothing but
    a temperature shapes the distribution.
    """
    if logits.is_cuda:
        from lockstep.engine.cuda.trainer import logprobs_of

        rows = logits.reshape(-1, logits.shape[-1])
        return logprobs_of(rows, tokens.reshape(-1), temperature).view(tokens.shape)
    logprobs = tempered_logprobs(logits, temperature)
    return logprobs.gather(-1, tokens[..., None]).squeeze(-1)


def tempered_logprobs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the logprobs of the whole vocabulary in float32, tempered as the engine tempers."""
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    return torch.log_softmax(logits, dim=-1)


def entropies(logprobs: Tensor) -> Tensor:
    """Return the entropy of each distribution (..., vocab) of finite logprobs."""
    return -(logprobs.exp() * logprobs).sum(-1)


def packs(model: Any) -> bool:
    """Whether the model can be called with a packed row: prepared, and on a CPU."""
    prepared = model.config.get_text_config()._attn_implementation == ATTENTION_NAME
    return bool(prepared and model.device.type == "cpu")


def head_dim_of(config: Any) -> int:
    """The size of one attention head of a transformers model with this config."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(dim)


def products_of(config: Any) -> Products:
    """The matrix products of a transformers model with this config, as the engine counts them."""
    heads, dim = config.num_attention_heads, head_dim_of(config)
    layers = range(config.num_hidden_layers)
    experts = getattr(config, "num_experts", 0) or 0
    dense = getattr(config, "mlp_only_layers", None) or ()
    step = getattr(config, "decoder_sparse_step", 1)
    routed = [at for at in layers if experts and at not in dense and (at + 1) % step == 0]
    return products(
        hidden=config.hidden_size,
        q_size=heads * dim,
        kv_size=(config.num_key_value_heads or heads) * dim,
        vocab=config.vocab_size,
        intermediate=config.intermediate_size if len(routed) < len(layers) else 0,
        experts=experts if routed else 0,
        expert_intermediate=config.moe_intermediate_size if routed else 0,
    )


def row_multiple_of(model: Any) -> int:
    """The row multiple to which sequences of this model are padded: the engine's own.

    With adapters of PEFT on it, the multiple that also holds for their ranks.
    """
    if model.device.type != "cpu":
        return 1
    base = products_of(model.config.get_text_config())
    multiples = [row_multiple(base)]
    for adapter in getattr(model, "peft_config", {}).values():
        multiples.append(row_multiple(base.with_lora(adapter.r)))
    return max(multiples) if all(multiples) else MULTIPLES[-1]
