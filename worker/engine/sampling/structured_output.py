"""The form that an output must have: checked, compiled, and turned into masks of allowed tokens.

llguidance does the work; its state is a pure function of the output's tokens. No torch.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.params import SamplingParams
from inferq.protocol.structured import StructuredOutputs
from inferq.worker.engine.sampling.form_errors import readable_error
from inferq.worker.engine.sampling.form_tokens import with_text_tokens

#: Compiled forms that are kept for the next request with the same text.
_MAX_COMPILED: Final = 256
#: Between two parts of a JSON text. Unbounded, a model may go on with spaces to its last token.
_WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,16}"


def parser_limits() -> LLParserLimits:
    """Bound what a form may cost: some 20 ms to compile, some 15 ms for each mask."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def check_structured_outputs(params: SamplingParams) -> None:
    """Raise `InvalidRequestError`, naming the form, if it cannot be compiled; takes milliseconds.

    Needs no tokenizer: a special token that a grammar names and the model lacks is found later.
    """
    form = params.structured_outputs
    if form is None:
        return
    message = LLMatcher.validate_grammar(_grammar(form), None, limits=parser_limits())
    if message and not message.startswith("WARNING"):
        raise form_error(form, message)


def form_error(form: StructuredOutputs, message: str) -> InvalidRequestError:
    """Return the error of a form that cannot be served."""
    text = readable_error(message, is_expression=form.regex is not None)
    return InvalidRequestError(text, field=field_of(form))


def field_of(form: StructuredOutputs) -> str:
    """Return the name of the field that holds the form, as errors name it."""
    (kind,) = form.to_wire()
    return f"structured_outputs.{kind}"


class FormCompiler:
    """Matchers for forms, over one model's tokens; compiled once, in the background.

    `tokenizer_json` gives the text of the model's tokenizer.json. For one thread at a time.
    """

    def __init__(self, tokenizer_json: Callable[[], str], end_token_ids: frozenset[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._end_token_ids = sorted(end_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile-forms")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    @property
    def mask_words(self) -> int:
        """Words of 32 bits in a mask, once a matcher was made; 0 before."""
        return 0 if self._tokenizer is None else -(-self._tokenizer.vocab_size // 32)

    def expect(self, form: StructuredOutputs) -> None:
        """Begin to compile a form that will be needed soon."""
        self._submit(form)

    def matcher(self, form: StructuredOutputs) -> LLMatcher:
        """Return a matcher at its beginning; raises `InvalidRequestError` for a bad form."""
        prototype = self._submit(form).result()
        if prototype.is_error():
            raise form_error(form, prototype.get_error())
        return prototype.deep_copy()

    def _submit(self, form: StructuredOutputs) -> Future[LLMatcher]:
        grammar = _grammar(form)
        if (known := self._compiled.get(grammar)) is not None:
            self._compiled.move_to_end(grammar)
            return known
        compiled = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return compiled

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            if not self._end_token_ids:
                raise InvalidRequestError(
                    "needs a model with an end token", field="structured_outputs"
                )
            content = with_text_tokens(self._tokenizer_json(), set(self._end_token_ids))
            self._tokenizer = LLTokenizer(content, eos_token=self._end_token_ids)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())


def _grammar(form: StructuredOutputs) -> str:
    """Return llguidance's own text of a form."""
    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.grammar is not None:
        return LLMatcher.grammar_from_lark(form.grammar)
    if form.choice:
        # Lark's string literals are JSON's.
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, form.choice)))
    schema = '{"type": "object"}' if form.json_object else form.json
    assert isinstance(schema, str)
    try:
        return LLMatcher.grammar_from_json_schema(
            schema, defaults={"whitespace_pattern": _WHITESPACE}
        )
    except ValueError as error:
        raise form_error(form, str(error)) from None
