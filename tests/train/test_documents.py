"""Documents: masked prompts, packed rows, a held-out share; and that packed documents do not see each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import meshdsl as md
from meshdsl.errors import UsageError
from meshdsl.models.gpt2 import gpt2
from meshdsl.train import Documents, read_rows, resolve
from meshdsl.train.documents import IGNORED, pieces_of

ROWS = [{"prompt": f"{i}+{j}=", "completion": str(i + j)} for i in range(9) for j in range(9)]


def test_documents_are_packed_whole_and_learn_their_completions_alone() -> None:
    data = Documents(ROWS, seed=0, batch=4, length=16, held_out=0.2)
    learned: set[str] = set()
    for split in ("train", "held_out"):
        batch = data(split, 1)
        assert {x.shape for x in batch.values()} == {(4, 16)} and {x.dtype for x in batch.values()} == {
            np.dtype("int32")
        }
        for tokens, targets, segments in zip(*batch.values(), strict=True):
            for n in range(1, segments.max() + 1):
                at = segments == n
                text = bytes(tokens[at].tolist()).decode()
                answer = [t for t in targets[at] if t not in (IGNORED, 0)]
                assert eval_sum(text) == int(bytes(answer).decode())
                learned.add(text)
            assert (targets[segments == 0] == IGNORED).all()
    assert len(learned) > 8
    splits = [{d.share for d in data._splits[split]} for split in ("train", "held_out")]
    assert not splits[0] & splits[1] and sum(map(len, splits)) == len(ROWS)
    again = Documents(ROWS, seed=0, batch=4, length=16, held_out=0.2)
    assert (again("train", 7)["tokens"] == data("train", 7)["tokens"]).all() and again.describe() == data.describe()


def eval_sum(text: str) -> int:
    left, _, right = text.partition("=")[0].partition("+")
    return int(left) + int(right)


def test_special_tokens_are_around_a_document_once(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<a>": 4}, unk_token="a"))
    words.add_special_tokens(["<s>", "</s>", "<a>"])
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 1)])
    words.save(str(tmp_path / "tokenizer.json"))
    rows = [{"prompt": "a", "completion": "b b"}, {"prompt": "<s>b", "completion": "a</s>"}]
    data = Documents(rows, seed=0, batch=1, length=16, tokenizer=tmp_path, held_out=0.0)
    batch = {name: x[0][x[0] != 0].tolist() for name, x in data("train", 1).items() if name != "segments"}
    assert batch["targets"][:8] in (
        [IGNORED, 3, 3, 1, IGNORED, 2, 1, IGNORED],
        [IGNORED, 2, 1, IGNORED, 3, 3, 1, IGNORED],
    )
    between = sum(d.share for d in data._splits["train"]) / 2
    one = Documents(rows, seed=0, batch=1, length=16, tokenizer=tmp_path, held_out=between)
    assert one.bytes_per_token == {5: 3 / 3, 4: 5 / 2}[len(one._splits["held_out"][0].ids)]


def test_templates_that_begin_answers_or_rewrite_earlier_ones() -> None:
    def template(messages: Any, add_generation_prompt: bool, kept: int = 9) -> str:
        text = "".join(f"<{m['role']}>{m['content'][: 9 if m is messages[-1] else kept]};" for m in messages)
        return text + "<assistant><think>" * add_generation_prompt

    chat = [{"role": role, "content": f"{role[0]}{n}"} for n, role in enumerate(["user", "assistant"] * 2)]
    pieces = pieces_of({"messages": chat}, template)
    assert pieces[:2] == [("<user>u0;<assistant>", False), ("a1;", True)] and pieces[3] == ("a3;", True)
    with pytest.raises(md.MeshdslError, match="writes earlier messages differently once later ones follow"):
        pieces_of({"messages": chat}, lambda **given: template(**given, kept=1))


def test_chats_learn_what_the_assistant_says(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    pieces = pieces_of({"messages": chat})
    assert [text for text, learned in pieces if learned] == ["b<|im_end|>\n"]
    assert "".join(text for text, _ in pieces).count("<|im_start|>") == 3
    with pytest.raises(md.MeshdslError, match="a document has text, prompt and completion, or messages"):
        pieces_of({"question": "?"})
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": chat}) + "\n\n" + json.dumps({"text": "x"}))
    assert len(list(read_rows(str(file)))) == 2
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    datasets.disable_progress_bars()
    whole = datasets.load_dataset(str(tmp_path / "set"), split="train", cache_dir=str(tmp_path / "cache"))
    whole.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": whole}).save_to_disk(str(tmp_path / "both"))
    for name in ("saved", "both"):
        assert list(read_rows(f"hf:{tmp_path / name}")) == ROWS
    with pytest.raises(md.MeshdslError, match=r"the data set hf:.*cache cannot be read"):
        list(read_rows(f"hf:{tmp_path / 'cache'}"))
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n[1]\n')
    with pytest.raises(md.MeshdslError, match=r"bad.jsonl:2 is no JSON object, as each line of a .jsonl file is"):
        list(read_rows(str(tmp_path / "bad.jsonl")))
    (tmp_path / "notes.txt").write_text("one\n\ntwo")
    assert [row["text"] for row in read_rows(str(tmp_path / "notes.txt"))] == ["one", "two"]


def test_packed_documents_have_the_losses_that_they_have_alone() -> None:
    workload = gpt2.replace(batch=1, length=12, positions=12, vocab=256, packed=True)
    params, _ = md.compile(workload.init, "", "")(md.random.key(0))
    loss_of = md.compile(lambda params, batch: workload.loss(workload.config)(params, batch).value, "", "")
    one, two = ({"text": text} for text in ("abc", "defg"))

    def loss(*rows: dict[str, str]) -> tuple[float, int]:
        batch = Documents(rows, seed=0, batch=1, length=12, held_out=0.0)("train", 1)
        count = int((batch["targets"] != IGNORED).sum())
        tensors = {name: md.tensor(x, "batch length") for name, x in batch.items()}
        return float(loss_of(params, tensors)) * count, count

    (a, n), (b, m), (both, all_of) = loss(one), loss(two), loss(one, two)
    assert n + m == all_of
    np.testing.assert_allclose(a + b, both, rtol=1e-5)


def test_settings_of_data_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[0]))

    def settings(**options: Any) -> Any:
        return resolve("gpt2", None, [], {f"data.{name}": value for name, value in options.items()})

    chosen = settings(source=str(file), held_out=0.0)
    assert chosen.workload.config.packed and chosen.workload.data(chosen.workload.config, 0)("train", 1)["tokens"].any()
    with pytest.raises(UsageError, match="no effect without --data"):
        settings(tokenizer="x")
    with pytest.raises(UsageError, match="has no function 'nothing'"):
        settings(source="meshdsl.train:nothing")
    with pytest.raises(UsageError, match="is text, for models of tokens and targets"):
        resolve("mlp", None, [], {"data.source": str(file)})
