"""Workloads of the decode benchmark: which geometry, which share of it a rank holds, batch and context."""

import dataclasses

from dsv41_jax.config import ModelConfig
from dsv41_jax.engram import engram_primes
from dsv41_jax.presets import FLASH, TINY

_UNKNOWN_ROWS = 1 << 40  # enough for any table, until the primes are known


@dataclasses.dataclass(frozen=True)
class Workload:
    """One benchmark workload. notes: everything in which it is not the released model on its released layout."""

    name: str
    config: ModelConfig
    batch: int
    context: int
    headroom: int = 1024  # page-table tokens beyond the context, as the reference's capacity 33792 has
    page_tokens: int = 128
    notes: tuple[str, ...] = ()

    @property
    def capacity(self) -> int:
        return self.context + self.headroom


def with_engram_vocab(c: ModelConfig, size: int) -> ModelConfig:
    """The same geometry with smaller hashed tables: primes from `size` upwards."""
    c = dataclasses.replace(c, engram_vocab_size=size, engram_num_embeddings=(_UNKNOWN_ROWS,) * len(c.engram_layer_ids))
    return dataclasses.replace(c, engram_num_embeddings=tuple(sum(map(sum, p)) for p in engram_primes(c)))


def _cut_order(c: ModelConfig) -> list[int]:
    """Layers by how much a cut needs them: one of each class first (at release 20 FULL1, 2 FULL2, 24 REINDEX, 1 SWA with
    an engram, 3 and 25 REUSE), then the rest in order."""
    first = lambda keep: next((s.index for s in c.layers if keep(s)), None)
    reindex = first(lambda s: s.restricted)
    wanted = (
        c.candidate_source_layer_id,
        first(lambda s: s.kind == "FULL2"),
        reindex,
        first(lambda s: s.engram is not None),
        first(lambda s: s.kind == "REUSE"),
        first(lambda s: s.kind == "REUSE" and reindex is not None and s.index > reindex),
        *range(c.num_hidden_layers),
    )
    return [i for i in dict.fromkeys(wanted) if i is not None]


def cut_layers(c: ModelConfig, n: int) -> ModelConfig:
    """The released schedule cut to `n` layers that keep every class: 6 layers hold all five. Raises ValueError unless
    3 <= n <= the layers there are."""
    total = c.num_hidden_layers
    if not 3 <= n <= total:
        raise ValueError(f"layers: expected 3..{total}, got {n}")
    if n == total:
        return c
    kept = sorted(_cut_order(c)[:n])
    place = {old: new for new, old in enumerate(kept)}
    renumber = lambda ids: tuple(place[i] for i in ids if i in place)
    draft = c.num_nextn_predict_layers
    c = dataclasses.replace(
        c,
        num_hidden_layers=n,
        compress_ratios=tuple(c.compress_ratios[i] for i in kept) + (0,) * draft,
        kv_source_layer_ids=renumber(c.kv_source_layer_ids),
        index_source_layer_ids=renumber(c.index_source_layer_ids),
        candidate_source_layer_id=place[c.candidate_source_layer_id],
        engram_layer_ids=renumber(c.engram_layer_ids),
        engram_num_embeddings=tuple(_UNKNOWN_ROWS for i in c.engram_layer_ids if i in place),
        dspark_target_layer_ids=tuple(range(n - len(c.dspark_target_layer_ids), n)),
    )
    return with_engram_vocab(c, c.engram_vocab_size)


def rank_of(c: ModelConfig, ranks: int) -> ModelConfig:
    """What one of `ranks` expert-parallel ranks computes, as a network of its own: its experts, routed over them alone, so
    that each sees as many rows as it would among all ranks."""
    return dataclasses.replace(
        c, n_routed_experts=c.n_routed_experts // ranks, dspark_n_routed_experts=c.dspark_n_routed_experts // ranks
    )


def flash_rank(engram_vocab: int = 1_000_000) -> Workload:
    """One rank of DP4/EP4 at released widths on one GPU (spec/performance.md, "The workload")."""
    c = with_engram_vocab(rank_of(FLASH, 4), engram_vocab)
    rows, whole = sum(c.engram_num_embeddings), sum(FLASH.engram_num_embeddings)
    expert_note = "one rank of four: 96 of 384 routed and 32 of 128 draft experts, routed over alone; no exchange between ranks"
    engram_note = (f"engram tables cut to {rows} of {whole} rows (a rank of four holds {whole // 4}): hashed rows, gates, "
                   "bytes read and products are unchanged")  # fmt: skip
    made_note = "random weights in the stored formats, synthetic KV, drafts accepted by force"
    return Workload("flash-rank", c, batch=64, context=32768, notes=(expert_note, engram_note, made_note))


def flash() -> Workload:
    """The release over all ranks of a host (bench.decode --ranks); batch: requests of each rank."""
    return Workload("flash", FLASH, batch=64, context=32768,
                    notes=("random weights in the stored formats, synthetic KV, drafts accepted by force",))  # fmt: skip


def tiny() -> Workload:
    """Every mechanism of the release in a size that a CPU runs in seconds."""
    return Workload("tiny", TINY, batch=2, context=64, headroom=256, page_tokens=16, notes=("random weights, synthetic KV",))


PRESETS = {"tiny": tiny, "flash-rank": flash_rank, "flash": flash}


def workload(
    preset: str,
    *,
    layers: int | None = None,
    batch: int | None = None,
    context: int | None = None,
    capacity: int | None = None,
) -> Workload:
    """A preset with its cuts applied and said in the notes. capacity: tokens that the page tables hold, at least the
    preset's headroom beyond the context. Raises ValueError for unknown names and impossible cuts."""
    if preset not in PRESETS:
        raise ValueError(f"preset: expected one of {sorted(PRESETS)}, got {preset!r}")
    w = PRESETS[preset]()
    if layers is not None and layers != w.config.num_hidden_layers:
        note = f"cut to {layers} of {w.config.num_hidden_layers} layers"
        w = dataclasses.replace(w, config=cut_layers(w.config, layers), notes=(*w.notes, note))
    w = dataclasses.replace(w, batch=batch or w.batch, context=context or w.context)
    if capacity is not None:
        if capacity < w.capacity:
            raise ValueError(f"capacity: expected at least context + {w.headroom} = {w.capacity}, got {capacity}")
        if capacity > w.config.max_position_embeddings:
            raise ValueError(f"capacity: expected at most {w.config.max_position_embeddings}, got {capacity}")
        w = dataclasses.replace(w, headroom=capacity - w.context)
    if w.capacity > w.config.max_position_embeddings:
        raise ValueError(f"context: expected at most {w.config.max_position_embeddings - w.headroom}, got {w.context}")
    return w
