"""What the command line's tests share: a two-layer checkpoint, `run(*argv)`, and a script in the network's place.

Fixtures are imported by name: `from cli_harness import broken, run, scripted, short`.
"""

import dataclasses
import shutil

import pytest

from dsv41_jax import cli
from dsv41_jax.make_checkpoint import make_checkpoint
from dsv41_jax.presets import TINY

SHORT = dataclasses.replace(
    TINY, num_hidden_layers=2, num_nextn_predict_layers=1, compress_ratios=(0, 1, 0), kv_source_layer_ids=(1,),
    index_source_layer_ids=(1,), candidate_source_layer_id=1, engram_layer_ids=(1,), engram_num_embeddings=(1172,),
    dspark_target_layer_ids=(1,), n_routed_experts=4, num_experts_per_tok=2, dspark_n_routed_experts=4,
    max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return make_checkpoint(SHORT, tmp_path_factory.mktemp("cli") / "short", seed=0)


@pytest.fixture
def broken(short, tmp_path):
    """A copy of the checkpoint that may be broken."""
    return shutil.copytree(short, tmp_path / "broken")


@pytest.fixture
def run(capsys):
    """run(*argv) -> (exit code, stdout, stderr)"""

    def call(*argv):
        try:
            code = cli.main([str(a) for a in argv])
        except SystemExit as e:
            code = e.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def assert_refused(result, message):
    code, out, err = result
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and err.endswith("\n") and "Traceback" not in err
    assert message in err, err


@pytest.fixture
def scripted(monkeypatch):
    """Replaces the network by a script: request r gets the ids of outputs[r], three a step. Returns the calls it saw."""
    from dsv41_jax import generate as module

    calls = []

    def install(outputs, reason="length"):
        def generate(params, config, prompts, *, on_token, **options):
            calls.append((prompts, options))
            results = []
            for r, ids in enumerate(outputs):
                for i in range(0, len(ids), 3):
                    on_token(r, ids[i : i + 3])
                results.append(module.GenerationResult(ids, reason, drafted=10 * (options["gamma"] != 0), accepted=4))
            return results

        monkeypatch.setattr(module, "generate", generate)
        return calls

    return install
