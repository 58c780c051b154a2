"""Parameters of one request. Field names are vLLM's, so that a script changes only its import line."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from starling_engine.errors import InvalidRequest

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_LOGIT_BIAS = 1024
MAX_LENGTH_PENALTY = 20.0
MAX_TOKEN_IDS = 8192
"""Limit of each of the lists of stop, allowed and banned tokens."""
MAX_PATTERN_SIZE = 1024
MAX_PATTERN_COUNT = 1000
MAX_FORM_CHARACTERS = 100_000
"""Characters of a form: those of its texts, and one for each entry of an object or a list."""
MAX_FORM_NESTING = 200
"""Objects and lists in each other, in a form."""
PoolingTask = Literal["embed", "classify", "token_embed", "token_classify", "sparse_embed"]
OF_TOKENS: tuple[PoolingTask, ...] = ("token_embed", "token_classify")
"""Tasks with numbers of each token."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A form that the output has to have. One of these says which; the names are vLLM's.

    json            a JSON schema, as text or parsed from JSON
    json_object     True: any JSON object
    regex           an expression that the whole output matches, in the syntax of Rust's regex crate
    choice          the output is one of these texts
    grammar         a context-free grammar, as Lark or EBNF (GBNF)
    structural_tag  text with parts that have a form of their own, as vLLM and xgrammar describe it

    `disable_any_whitespace` leaves no white space between the tokens of JSON. With `reasoning` the model may reason first, between
    its tokenizer's marks of reasoning, where anything goes.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    reasoning: bool = False

    def check_size(self) -> None:
        """Raises InvalidRequest for a form that would take long to read. Its types need not be right."""
        for name in ("json", "regex", "choice", "grammar", "structural_tag"):
            if fault := fault_of_size(getattr(self, name)):
                raise InvalidRequest(fault, f"structured_outputs.{name}")

    def outline(self) -> "StructuredOutputsParams":
        """Returns the form without the contents of schemas and tags, which may have any types and take long to look through."""
        empty: dict[str, Any] = {name: {} for name in ("json", "structural_tag") if isinstance(getattr(self, name), dict)}
        return msgspec.structs.replace(self, **empty)

    def has_choice_of(self, size: int) -> bool:
        """Returns whether an output of so many bytes is possible, as far as choices tell."""
        return not self.choice or self.reasoning or any(len(one.encode(errors="surrogatepass")) >= size for one in self.choice)


class RepetitionDetectionParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Says when an output counts as one that repeats itself. The names are vLLM's.

    max_pattern_size  most tokens of a pattern that repeats; 0 looks for none
    min_pattern_size  fewest tokens of it; 0 means 1
    min_count         how often it has to come in a row, at least 2
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def validate(self) -> None:
        """Raises InvalidRequest naming the first field that is out of its bounds."""
        prefix = "repetition_detection."
        _within(f"{prefix}max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN_SIZE)
        _within(f"{prefix}min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        _within(f"{prefix}min_count", self.min_count, 2 if self.max_pattern_size else 0, MAX_PATTERN_COUNT)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of sampling.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 are off. `logprobs` k returns the k most likely tokens and the
    chosen one for each output position, `prompt_logprobs` likewise for the prompt. `max_tokens` None means up to the model's
    length. `seed` None lets the frontend draw one. Penalties follow OpenAI (presence, frequency: over output tokens) and
    CTRL (repetition: over prompt and output tokens, https://arxiv.org/abs/1909.05858). `speculative` False keeps the request from
    speculative decoding, which changes its speed and nothing else. `structured_outputs` restricts what is sampled to a form; an
    output that has it ends, also below `min_tokens`. `repetition_detection` ends an output that repeats itself, with the
    finish reason "repetition", once it has `min_tokens`. `shown_token_ids` are special tokens that the text shows though
    `skip_special_tokens` leaves out the others. Behind `thinking_token_budget` tokens of reasoning, the token that ends it comes.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    shown_token_ids: list[int] | None = None
    speculative: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    thinking_token_budget: int | None = None

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def validate(self, vocab_size: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        """Raises InvalidRequest naming the first field that has the wrong type or is out of its bounds."""
        self._validate_lengths()
        form = self.structured_outputs
        outline = form.outline() if isinstance(form, StructuredOutputsParams) else form
        check_types(msgspec.structs.replace(self, structured_outputs=outline))
        _within("n", self.n, 1, MAX_N)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _within("top_k", self.top_k, -1, 2**31 - 1)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.thinking_token_budget is not None:
            _within("thinking_token_budget", self.thinking_token_budget, 0, 2**31 - 1)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens if self.max_tokens is not None else 2**31 - 1)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _within(name, value, 0, MAX_LOGPROBS)
        if self.structured_outputs is not None and not self.structured_outputs.has_choice_of(self.min_tokens):
            raise InvalidRequest(f"each of the choices has fewer bytes than {self.min_tokens} tokens need", "min_tokens")
        self._validate_stops()
        if self.repetition_detection is not None:
            self.repetition_detection.validate()
        self._validate_token_lists(vocab_size)
        self._validate_choice(vocab_size, eos_token_ids)

    def _validate_lengths(self) -> None:
        if isinstance(self.structured_outputs, StructuredOutputsParams):
            self.structured_outputs.check_size()
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "shown_token_ids"):
            tokens = getattr(self, name)
            if isinstance(tokens, list) and len(tokens) > MAX_TOKEN_IDS:
                raise InvalidRequest(f"at most {MAX_TOKEN_IDS} tokens, got {len(tokens)}", name)

    def _validate_stops(self) -> None:
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop_strings)}", "stop")
        if any(not s for s in self.stop_strings):
            raise InvalidRequest("a stop string must not be empty", "stop")
        if self.stop_strings and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True", "stop")

    def _validate_token_lists(self, vocab_size: int) -> None:
        if self.logit_bias is not None:
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise InvalidRequest(f"at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}", "logit_bias")
            _known_tokens("logit_bias", self.logit_bias, vocab_size)
            for bias in self.logit_bias.values():
                _within("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("an empty list allows no token at all", "allowed_token_ids")
        for name, tokens in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("banned_token_ids", self.banned_token_ids),
            ("shown_token_ids", self.shown_token_ids),
        ):
            _known_tokens(name, tokens or (), vocab_size)

    def _validate_choice(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Checks that a token is left to choose, also while `min_tokens` forbids those that end the output."""
        never = set(self.banned_token_ids or ())
        if self.min_tokens:
            never.update(self.stop_token_ids or (), () if self.ignore_eos else eos_token_ids)
        if self.allowed_token_ids is not None and set(self.allowed_token_ids) <= never:
            raise InvalidRequest("every allowed token is banned, or may not come before min_tokens", "allowed_token_ids")
        if len(never) >= vocab_size:
            raise InvalidRequest("every token is banned, or may not come before min_tokens", "banned_token_ids")


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for vectors of the last hidden states instead of tokens. Tasks have vLLM's names.

    embed           one vector of their mean, or of the last or first token's
    classify        what the model's head for classification makes of that one
    token_embed     a vector of each token's
    token_classify  what the head makes of each token's
    sparse_embed    a weight for some tokens of the vocabulary; the name is ours

    `pooling` and `normalize` None are as the checkpoint's authors mean it. A vector is cut to its first `dimensions` numbers before
    it is normalized. With `logit_token_ids` the vector is the logits of these tokens behind the prompt, and nothing else counts.
    From token `second_from` on the prompt is the second text of a pair, which some encoders tell from the first. From token
    `unseen_from` on no token of an encoder is seen by any, though it sees the others. `adapter` is one of the checkpoint's, by
    name, which changes its weights for this prompt. `pooling` is "late" for some heads alone: the mean of what they make of each
    token. No request may ask for that.
    """

    task: PoolingTask = "embed"
    pooling: Literal["mean", "last", "cls", "late"] | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    logit_token_ids: list[int] | None = None
    second_from: int | None = None
    unseen_from: int | None = None
    adapter: str | None = None

    @property
    def reads_prefix_cache(self) -> bool:
        """False where the hidden states of the whole prompt are needed. `pooling` is known."""
        return self.pooling == "last" and self.task in ("embed", "classify")

    def validate(self, vector_size: int, vocab_size: int, possible: Sequence[int] = (), segments: int = 0) -> None:
        """Raises InvalidRequest naming the field that is wrong. `possible` has the model's `dimensions`; empty: any.

        `segments` are those that the model knows of.
        """
        check_types(self)
        if self.pooling == "late":
            raise InvalidRequest("must be mean, last or cls, got 'late'", "pooling")
        if self.pooling is not None and self.task in OF_TOKENS:
            raise InvalidRequest(f"with task {self.task} each token has numbers of its own", "pooling")
        if self.task == "sparse_embed":
            for name in ("pooling", "normalize", "dimensions"):
                if getattr(self, name) is not None:
                    raise InvalidRequest("is not for sparse vectors", name)
        if self.dimensions is not None:
            if possible and self.dimensions not in possible:
                raise InvalidRequest(f"this model has {', '.join(map(str, possible))}, got {self.dimensions}", "dimensions")
            _within("dimensions", self.dimensions, 1, vector_size)
        if self.logit_token_ids is not None and self.task != "embed":
            raise InvalidRequest(f"is for the task embed, got {self.task}", "logit_token_ids")
        _known_tokens("logit_token_ids", self.logit_token_ids or (), vocab_size)
        if self.second_from is not None:
            _within("second_from", self.second_from, 0, math.inf)
            if segments < 2:
                raise InvalidRequest("this model does not tell the second text of a pair from the first", "second_from")
        if self.unseen_from is not None:
            _within("unseen_from", self.unseen_from, 1, math.inf)


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Beam search over `beam_width` beams; scores are divided by length ** length_penalty.

    A search draws no tokens, and scores by the model's own probabilities, so `temperature` may be 0 or 1. `logprobs` k returns the
    k most likely tokens and the chosen one for each output position.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    @property
    def n(self) -> int:
        """Outputs of a prompt."""
        return self.beam_width

    def validate(self, num_eos: int) -> None:
        """Raises InvalidRequest naming the first field that is impossible with `num_eos` end-of-sequence tokens."""
        check_types(self)
        # A step lists the likeliest tokens of a beam, and the tokens that may end it besides.
        _within("beam_width", self.beam_width, 1, MAX_LOGPROBS - (0 if self.ignore_eos else num_eos))
        _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _within("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.temperature not in (0.0, 1.0):
            raise InvalidRequest(
                f"a beam search draws no tokens: temperature must be 0 or 1, got {self.temperature}", "temperature"
            )


def check_types(params: SamplingParams | PoolingParams | BeamSearchParams) -> None:
    """Checks types in the frontend: a Struct takes any value, and the core's decoder has nobody to answer to.

    Raises InvalidRequest naming the field.
    """
    try:
        checked = msgspec.convert(msgspec.to_builtins(params), type(params))
    except (msgspec.ValidationError, TypeError) as error:
        text, _, path = str(error).partition(" - at `")
        raise InvalidRequest(text, path.strip("`").removeprefix("$.").split("[")[0] or None) from None
    for name in params.__struct_fields__:
        wanted, given = type(getattr(checked, name)), type(getattr(params, name))
        if issubclass(wanted, msgspec.Struct) and given is not wanted:
            raise InvalidRequest(f"expected `{wanted.__name__}`, got `{given.__name__}`", name)


def fault_of_size(value: Any) -> str | None:
    """Says which limit a value of JSON exceeds. Goes a level at a time, and stops at the limits, so that none can make it slow."""
    sized = (dict, list, str)
    size, level = 0, [value]
    for _ in range(MAX_FORM_NESTING + 1):
        level = [one for one in level if isinstance(one, sized)]
        size += sum(map(len, level))
        if size > MAX_FORM_CHARACTERS:
            return f"it has more than {MAX_FORM_CHARACTERS} characters"
        if not level:
            return None
        level = [part for one in level if not isinstance(one, str) for part in _parts(one)]
    return f"it is nested more than {MAX_FORM_NESTING} levels deep"


def _parts(value: dict[Any, Any] | list[Any]) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else value


def _within(name: str, value: float, low: float, high: float, low_open: bool = False) -> None:
    if not math.isfinite(value) or value > high or value < low or (low_open and value == low):
        bounds = f"{'(' if low_open else '['}{low:.12g}, {high:.12g}]"
        raise InvalidRequest(f"{name} must be in {bounds}, got {value}", name)


def _known_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"token id {token} is not in the vocabulary of {vocab_size} tokens", name)
