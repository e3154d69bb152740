"""`meshdsl import`, `generate` and `export` with a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.running import here
from tests.models.test_hugging_face import REFERENCES, bits, reference

MODEL = str(Path(__file__).parent.parent.parent / "models" / "llama.py") + ":llama"
SOURCE = f"hf:{REFERENCES / 'llama3'}"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "run"
    run = here("import", SOURCE, "--model", MODEL, "--out", str(folder), "--layout", "zero")
    assert run.code == 0 and run.out.startswith(f"4,152 parameters of {SOURCE} in 11 tensors, float32\nsaved as"), run
    return folder


def test_generate_takes_the_tokens_of_transformers(imported: Path):
    prompts = [part for row in reference("llama3")["tokens"] for part in ("--prompt-ids", ",".join(map(str, row)))]
    common = ["generate", MODEL, *prompts, "--tokens", "6", "--json"]
    for more in (["--params", SOURCE], ["--params", str(imported), "--layout", "zero_context"]):
        run = here(*common, *more)
        assert run.code == 0, run
        np.testing.assert_array_equal(json.loads(run.out)["tokens"], reference("llama3")["greedy"])


def test_generate_errors(imported: Path):
    common = ["generate", MODEL, "--params", str(imported)]
    for arguments, message in [
        (["--prompt-ids", "1,29"], "--prompt-ids has 29, and the model has 29 tokens, from 0 to 28"),
        (["--prompt-ids", "1,x"], "--prompt-ids: [1] must be an integer from 0 to 1e+09, got 'x'"),
        (["--prompt-ids", "1", "--seed", "1"], "--seed has no effect without --temperature"),
        (["--prompt-ids", "1", "--temperature", "0"], "must be a number above 0 and at most 1e+06, got '0'"),
        (["--prompt-ids", "1", "--tokens", "999999"], "take 1000000 positions, and the model has"),
        (["--prompt-ids", "1", "--params", "nowhere"], "there is no directory 'nowhere'"),
    ]:
        run = here(*common, *arguments)
        assert run.code == 2 and message in run.err, run


def test_export_writes_the_imported_bytes(imported: Path, tmp_path: Path):
    run = here("export", str(imported), f"hf:{tmp_path / 'out'}", "--model", MODEL)
    assert (run.code, run.out) == (0, f"step 0 written to hf:{tmp_path / 'out'}\n"), run
    assert bits(tmp_path / "out") == bits(REFERENCES / "llama3")
    kept, own = (json.loads((at / "config.json").read_text()) for at in (REFERENCES / "llama3", tmp_path / "out"))
    assert {**own, "dtype": kept["dtype"]} == kept  # only what changed is changed: here, the dtype that is written
    assert here("export", str(imported), f"hf:{tmp_path / 'out'}").code == 2
    again = here("export", str(imported), f"hf:{tmp_path / 'out'}", "--model", MODEL)
    assert again.code == 1 and "it has files already; give a new directory" in again.err, again


def test_imported_weights_are_not_trained_on_bytes(imported: Path, tmp_path: Path):
    run = here("train", MODEL, "--config", str(imported / "config.toml"), "--print-config")
    assert run.code == 0, run  # the reference has no tokenizer
    (imported / "base" / "tokenizer.json").write_text("{}")
    run = here("train", MODEL, "--config", str(imported / "config.toml"), "--print-config")
    (imported / "base" / "tokenizer.json").unlink()
    assert run.code == 2 and "give text with --data" in run.err, run


def test_import_errors(tmp_path: Path):
    for arguments, code, message in [
        ([str(tmp_path), "--model", MODEL], 2, "write the directory as hf:DIR"),
        ([f"hf:{tmp_path / 'none'}", "--model", MODEL], 4, "there is no folder"),
        ([f"hf:{REFERENCES / 'gpt2'}", "--model", MODEL], 4, "is a model of type 'gpt2', and llama reads 'llama'"),
        ([SOURCE, "--model", "nothing"], 2, "no model 'nothing', and no file"),
    ]:
        run = here("import", *arguments)
        assert run.code == code and message in run.err, run


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Characters as tokens: `a` is 1, `b` 2 and so on to 25; the end of a text is 26."""
    library = pytest.importorskip("tokenizers", reason="it is in the extra `dev`")
    ids = {"?": 0, **{chr(96 + n): n for n in range(1, 26)}, "</s>": 26, "_": 27, "!": 99}
    model = library.Tokenizer(library.models.WordLevel(ids, unk_token="?"))
    model.add_special_tokens(["</s>"])
    model.pre_tokenizer = library.pre_tokenizers.Split("", "isolated")
    model.decoder = library.decoders.Fuse()
    model.save(str(path := tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))
    return path


def test_generate_takes_and_prints_text(imported: Path, tokenizer: Path):
    common = ["generate", MODEL, "--params", str(imported), "--tokens", "6", "--json"]
    ids = here(*common, "--prompt-ids", "1,2,3", "--prompt-ids", "4,5")
    assert ids.code == 0, ids
    rows, letters = json.loads(ids.out)["tokens"], "?abcdefghijklmnopqrstuvwxy\0_"
    end = letters[rows[0][1]]
    text = here(*common, "--tokenizer", str(tokenizer), "--prompt", "abc", "--prompt", "de", "--end", end)
    assert text.code == 0, text
    texts = ["".join(letters[n] for n in row if n < len(letters)).partition(end)[0].replace("\0", "") for row in rows]
    assert json.loads(text.out)["texts"] == [f"abc{texts[0]}", f"de{texts[1]}"], "and prompts of different lengths"


def test_generate_of_text_errors(imported: Path, tokenizer: Path, tmp_path: Path):
    common = ["generate", MODEL, "--params", str(imported)]
    of_text = ["--tokenizer", str(tokenizer), "--prompt"]
    for arguments, code, message in [
        (["--prompt", "abc"], 2, "--prompt needs --tokenizer FILE, because "),
        (["--prompt-ids", "1", "--tokenizer", str(tokenizer)], 2, "--tokenizer has no effect without --prompt TEXT"),
        (["--prompt-ids", "1", "--end", "a"], 2, "--end has no effect without --prompt TEXT"),
        ([*of_text, ""], 2, "the tokenizer has no tokens for --prompt ''"),
        ([*of_text, "a!"], 2, "--prompt has 99, and the model has 29 tokens, from 0 to 28"),
        ([*of_text, "a", "--end", "<end>"], 1, "the tokenizer has no token '<end>'; its special tokens: </s>"),
        (["--tokenizer", str(tmp_path), "--prompt", "a"], 1, "tokenizer.json cannot be read: No such file"),
    ]:
        run = here(*common, *arguments)
        assert run.code == code and message in run.err, run
