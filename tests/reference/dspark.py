"""The DSpark drafter and greedy decoding with and without it (spec/model.md sections 11 and 12).

Use:

    drafter = Drafter(model)
    windows = drafter.new_windows()
    drafter.commit(windows, out.features, position)          # after every committed target token
    proposal = drafter.propose(windows, token, position)     # token: sampled, not yet run, at `position`
"""

import dataclasses

import numpy as np

from . import ops
from .model import Block, Model, State
from .ops import F32


@dataclasses.dataclass
class Proposal:
    ids: list[int]  # G drafts; ids[i] stands for position P+1+i
    logits: np.ndarray  # f32[G, V], Markov bias included
    confidence: np.ndarray  # f32[G], before the sigmoid
    trace: dict[str, np.ndarray]  # the golden data's `last_*` names without the prefix, [G, ...]


class Stage(Block):
    """One draft stage: a window-only block in which every row sees all rows and the same committed context."""

    def __init__(self, model: Model, index: int):
        ratio = model.c.compress_ratios[model.c.num_hidden_layers + index]
        super().__init__(model.w, model.c, model.p, f"mtp.{index}", ratio, model.c.dspark_num_experts_per_tok)
        self.tag = f"mtp{index}"

    def run(self, streams, pre, positions, context, trace):
        """streams [G, M, H], pre [G, M], context: list of [D] -> streams, pre."""
        trace[f"streams_in_{self.tag}"] = streams
        sites = [self.coefficients(h, "attn") for h in streams]
        u = [self.norm(self.collapse(h, p), "attn_norm") for h, p in zip(streams, pre)]
        keys = np.stack(context + [self.window_kv(x, at) for x, at in zip(u, positions)])
        outs = [self.attend(self.query(x, at)[1], keys, at) for x, at in zip(u, positions)]
        trace[f"attn_out_{self.tag}"] = np.stack(outs)
        rows, traces = [], []
        for h, y, (site_pre, post, comb) in zip(streams, outs, sites):
            traces.append({})
            rows.append(self.ffn(self.expand(h, y, post, comb), site_pre, traces[-1], self.tag))
        trace.update({name: np.stack([t[name] for t in traces]) for name in traces[0]})
        return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])


class Drafter:
    def __init__(self, model: Model):
        self.model, self.c, self.p, self.w = model, model.c, model.p, model.w
        self.stages = [Stage(model, i) for i in range(self.c.num_nextn_predict_layers)]

    def new_windows(self) -> list[dict[int, np.ndarray]]:
        """One {position: [D]} per stage."""
        return [{} for _ in self.stages]

    def commit(self, windows, features, position):
        """Add the committed target token at `position` with its features [targets*H] to every stage's window."""
        first = self.stages[0]
        main = first.norm(first.linear(features, "main_proj"), "main_norm")
        for window, stage in zip(windows, self.stages):
            window[position] = stage.window_kv(main, position)
            window.pop(position - self.c.sliding_window, None)

    def propose(self, windows, anchor: int, position: int) -> Proposal:
        """Drafts for the positions after the anchor token's `position`; windows hold those before it."""
        size, last = self.c.dspark_block_size, self.stages[-1]
        tokens = [anchor] + [self.c.dspark_noise_token_id] * (size - 1)
        positions = [position + i for i in range(size)]
        streams = np.repeat(self.w.matrix("embed.weight")[tokens][:, None], self.c.hc_mult, 1)
        pre = np.repeat(np.eye(1, self.c.hc_mult, dtype=F32), size, 0)
        trace = {}
        for window, stage in zip(windows, self.stages):
            context = [window[p] for p in sorted(window)]
            streams, pre = stage.run(streams, pre, positions, context, trace)
        x = np.stack([last.collapse(h, p) for h, p in zip(streams, pre)])
        base = self.model.head(x, f"{last.prefix}.norm")
        embed, head = last.get("markov_head.embed.weight"), last.get("markov_head.head.weight")
        ids, logits, confidence = [], [], []
        previous = anchor
        for i in range(size):
            logits.append(base[i] + head @ embed[previous])
            pair = np.concatenate([x[i], embed[previous]])
            confidence.append(last.get("confidence_head.proj.weight")[0] @ pair)
            previous = int(ops.best(logits[-1], 1)[0])
            ids.append(previous)
        return Proposal(ids, np.stack(logits), np.array(confidence, F32), trace)


def greedy(model: Model, prompt, count: int) -> list[int]:
    """The next `count` tokens after `prompt`, each the arg max of the target, one at a time."""
    state, tokens = model.new_state(), []
    out = model.run(prompt, state)[-1]
    for _ in range(count):
        tokens.append(int(ops.best(out.logits, 1)[0]))
        out = model.step(state, tokens[-1])
    return tokens


def speculative_greedy(model: Model, prompt, count: int, gamma: int, propose=None):
    """Draft, verify, accept -> (the first `count` tokens after `prompt`, accepted drafts of every round).

    `gamma` of the block's drafts are verified. `propose(windows, anchor, position) -> ids` replaces the drafter. The
    verify chunk runs on a copy of the state, and the committed tokens run again on the real one: nothing to roll back.
    """
    drafter = Drafter(model)
    propose = propose or (lambda *args: drafter.propose(*args).ids)
    state, windows = model.new_state(), drafter.new_windows()
    out = _commit(model, drafter, state, windows, prompt)
    tokens, accepted = [int(ops.best(out.logits, 1)[0])], []
    while len(tokens) < count:
        anchor = tokens[-1]
        drafts = propose(windows, anchor, state.length)[:gamma]
        verified = [int(ops.best(o.logits, 1)[0]) for o in model.run([anchor, *drafts], state.copy())]
        n = accepted_prefix(drafts, verified)
        tokens += [*drafts[:n], verified[n]]
        accepted.append(n)
        _commit(model, drafter, state, windows, [anchor, *drafts[:n]])
    return tokens[:count], accepted


def accepted_prefix(drafts, verified) -> int:
    """Length of the longest prefix of `drafts` that the target would have chosen itself (section 11, step 4)."""
    n = 0
    while n < len(drafts) and drafts[n] == verified[n]:
        n += 1
    return n


def _commit(model: Model, drafter: Drafter, state: State, windows, tokens):
    for token in tokens:
        out = model.step(state, int(token))
        drafter.commit(windows, out.features, state.length - 1)
    return out
