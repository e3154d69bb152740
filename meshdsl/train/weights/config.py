"""`HubConfig`: config.json of a Hugging Face directory, read key by key, so that nothing in it is overlooked.

A key that was not read, and that does not belong to the keys that leave the mathematics unchanged, is a problem. All
problems are collected, and reported together with those of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...errors import short

LARGEST = 1 << 24  # of a size; some layers compute tables of so many numbers
_HARMLESS = (  # of the file, of training from scratch, of text generation, of classification, of unused outputs
    "architectures model_type torch_dtype dtype transformers_version _name_or_path use_cache initializer_range "
    "initializer_factor bos_token_id eos_token_id pad_token_id unk_token_id decoder_start_token_id sep_token_id "
    "max_position_embeddings n_ctx pretraining_tp attention_dropout attn_pdrop embd_pdrop resid_pdrop dropout "
    "dropout_rate hidden_dropout_prob attention_probs_dropout_prob classifier_dropout hidden_dropout "
    "gradient_checkpointing task_specific_params summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj id2label label2id num_labels problem_type finetuning_task output_attentions "
    "output_hidden_states return_dict torchscript use_bfloat16 tokenizer_class prefix max_length min_length "
    "do_sample early_stopping num_beams temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences diversity_penalty "
    "num_beam_groups begin_suppress_tokens suppress_tokens forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty output_scores return_dict_in_generate "
    "cross_attention_hidden_size chunk_size_feed_forward pruned_heads tf_legacy_loss _attn_implementation_autoset "
    "output_router_logits router_aux_loss_coef router_jitter_noise is_decoder keys_to_ignore_at_inference "
    "encoder_stride pooler_act pooler_output_size out_features out_indices stage_names expand residual_in_fp32 "
    "rescale_prenorm_residual time_step_min time_step_max time_step_scale time_step_floor time_step_init_scheme "
    "use_mambapy use_associative_scan"
)


class HubConfig:
    """The values of a config.json. Each method reads one key; what does not fit is collected in `problems`.

    `tensors` are the names of the directory's tensors.

    >>> import meshdsl as md
    >>> config = md.HubConfig({"hidden_size": 64, "hidden_act": "relu", "use_cache": True})
    >>> config.size("hidden_size"), config.size("num_layers")
    (64, 1)
    >>> config.only("hidden_act", "silu")
    'silu'
    >>> md.HubConfig({"torch_dtype": "bfloat16"}).dtype
    'bfloat16'
    >>> print(*config.problems, sep="\\n")
    num_layers is missing
    hidden_act is 'relu'; this model supports only 'silu'
    """

    def __init__(self, values: Mapping[str, Any], where: str = "", tensors: Collection[str] = ()):
        self.values, self.where, self.tensors = dict(values), where, frozenset(tensors)
        self._problems: list[str] = []
        self._stands_in: list[str] = []  # keys with a value that stands in for a missing or wrong one
        self._read: set[str] = set()

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; 1 if there is a problem."""
        return self._checked(key, default, 1, _is_size, f"a positive integer up to {LARGEST}")

    def sizes(self, key: str, default: Sequence[int] | None = None) -> tuple[int, ...]:
        """A list of positive integers; (1,) if there is a problem."""
        expected = f"a list of positive integers up to {LARGEST}"
        return tuple(self._checked(key, default, (1,), _are_sizes, expected))

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number; 1 if there is a problem."""
        return float(self._checked(key, default, 1.0, _is_positive, "a positive number"))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false; false if there is a problem."""
        return self._checked(key, default, False, lambda value: isinstance(value, bool), "true or false")

    def only(self, key: str, *known: Any) -> Any:
        """One of the known values; the first is that of a file without the key."""
        value = self._value(key, known[0], known[0])
        if value in known and type(value) in [type(k) for k in known]:
            return value
        listed = ", ".join(map(repr, known))
        self._problems.append(f"{self.where}{key} is {short(value)}; this model supports only {listed}")
        return known[0]

    def table(self, key: str) -> HubConfig:
        """An object inside this one; empty if it is missing or null. Its problems are collected here too."""
        self._read.add(key)
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            value = self._problem(key, value, "an object", None)
        inner = HubConfig(value or {}, f"{self.where}{key}.")
        inner._problems, inner._stands_in = self._problems, self._stands_in
        return inner

    def close(self) -> None:
        """Add a problem for each key that was not read and may change the mathematics; null changes nothing."""
        for key, value in self.values.items():
            if key not in self._read and key not in _HARMLESS.split() and value is not None:
                text = f"{self.where}{short(key)[1:-1]} is {short(value)}, which this model does not know"
                self._problems.append(f"{text}; it may change the results")

    @property
    def dtype(self) -> str:
        """The dtype of the weights: `dtype`, or `torch_dtype` of older files; float32 without either."""
        stored = self.values.get("dtype", self.values.get("torch_dtype")) or "float32"
        return str(stored).removeprefix("torch.")

    @property
    def complete(self) -> bool:
        """True if no value stands in for a missing or wrong one."""
        return not self._stands_in

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems so far, one line each."""
        return tuple(dict.fromkeys(self._problems))

    def _checked(self, key: str, default: Any, instead: Any, fits: Callable[[Any], bool], expected: str) -> Any:
        """The value of a key if it fits, else `instead` and a problem."""
        value = self._value(key, default, instead)
        return value if fits(value) else self._problem(key, value, expected, instead)

    def _value(self, key: str, default: Any, instead: Any) -> Any:
        """The value of a key, or the default; `instead`, and a problem, if there is neither."""
        self._read.add(key)
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            self._problems.append(f"{self.where}{key} is missing")
            self._stands_in.append(key)
            return instead
        return value

    def _problem(self, key: str, value: Any, expected: str, instead: Any) -> Any:
        self._problems.append(f"{self.where}{key} is {short(value)}, and must be {expected}")
        self._stands_in.append(key)
        return instead


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= LARGEST


def _are_sizes(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(map(_is_size, value))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
