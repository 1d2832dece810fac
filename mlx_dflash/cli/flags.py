"""The flags of commands that decode: names, help and panels. Their defaults and ranges are the API's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MODELS, _SAMPLING, _PENALTIES = "Models", "Choosing tokens", "Penalties"
_SPECULATION, _PROMPT, _MEMORY, _OUTPUT = "Speculation", "Prompt", "Memory", "Output"


def _option(panel: str, text: str, *names: str, metavar: str | None = None) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)
    return option


Prompt = Annotated[
    str | None,
    typer.Argument(help="The prompt; - reads it from stdin, and so does leaving it out when stdin is a pipe."),
]
PromptFile = Annotated[Path | None, _option(_PROMPT, "Read the prompt from a file.", "--prompt-file", metavar="FILE")]
System = Annotated[str | None, _option(_PROMPT, "System message of the chat.", "--system", metavar="TEXT")]
ChatTemplate = Annotated[
    bool | None,
    _option(
        _PROMPT,
        "Put the prompt into the model's chat template, or continue it as it stands. Without either flag: a chat turn "
        "where the tokenizer has a template; the bundled pair continues prompts that begin with def or class.",
        "--chat-template/--no-chat-template",
        " /--ignore-chat-template",
    ),
]
ChatTemplateConfig = Annotated[
    str | None,
    _option(
        _PROMPT,
        "Arguments for the chat template as JSON, such as '{\"enable_thinking\": false}'.",
        "--chat-template-config",
        metavar="JSON",
    ),
]

Model = Annotated[
    str | None,
    _option(
        _MODELS,
        "Target: a folder or a Hub repository id. Without it, the bundled demonstration pair.",
        "--model",
        "-m",
        metavar="NAME",
    ),
]
Draft = Annotated[
    str | None,
    _option(
        _MODELS,
        "Draft: likewise. Without it one that is known for the target, if any; none looks for none.",
        "--draft",
        "-d",
        metavar="NAME",
    ),
]
DraftBits = Annotated[int | None, _option(_MODELS, "Quantise the draft on load: 4 or 8.", "--draft-bits", metavar="N")]
DraftDtype = Annotated[
    str | None,
    _option(_MODELS, "Compute the draft in float32, bfloat16 or float16.", "--draft-dtype", metavar="DTYPE"),
]
AdapterPath = Annotated[
    str | None, _option(_MODELS, "LoRA adapter of mlx-lm's for the target.", "--adapter-path", metavar="FOLDER")
]
TrustRemoteCode = Annotated[
    bool, _option(_MODELS, "Run Python code that a checkpoint brings along.", "--trust-remote-code")
]

MaxTokens = Annotated[
    int, _option(_SAMPLING, "Most tokens to generate; -1 for no limit.", "--max-tokens", "-n", metavar="N")
]
Stop = Annotated[
    list[str] | None,
    _option(_SAMPLING, "End the text before this string; may be repeated. \\n and \\t are understood.", "--stop"),
]
Temp = Annotated[
    float, _option(_SAMPLING, "Temperature; 0 always takes the likeliest token.", "--temp", "-t", metavar="X")
]
TopP = Annotated[float, _option(_SAMPLING, "Nucleus: smallest set with this much probability; 0 is off.", "--top-p")]
TopK = Annotated[int, _option(_SAMPLING, "Only the K likeliest tokens; 0 is off.", "--top-k")]
MinP = Annotated[float, _option(_SAMPLING, "Least probability, relative to the likeliest token; 0 is off.", "--min-p")]
Seed = Annotated[int | None, _option(_SAMPLING, "Makes a sampled text repeatable.", "--seed", metavar="N")]
LogitBias = Annotated[
    list[str] | None,
    _option(_SAMPLING, "Add VALUE to a token's logit; may be repeated.", "--logit-bias", metavar="ID=VALUE"),
]

RepetitionPenalty = Annotated[
    float | None, _option(_PENALTIES, "Divide logits of recent tokens by this.", "--repetition-penalty", metavar="X")
]
RepetitionContextSize = Annotated[
    int, _option(_PENALTIES, "How many tokens back that looks.", "--repetition-context-size", metavar="N")
]
PresencePenalty = Annotated[
    float | None,
    _option(_PENALTIES, "Subtract this from logits of recent tokens.", "--presence-penalty", metavar="X"),
]
PresenceContextSize = Annotated[
    int, _option(_PENALTIES, "How many tokens back that looks.", "--presence-context-size", metavar="N")
]
FrequencyPenalty = Annotated[
    float | None,
    _option(_PENALTIES, "Subtract this for each recent occurrence.", "--frequency-penalty", metavar="X"),
]
FrequencyContextSize = Annotated[
    int, _option(_PENALTIES, "How many tokens back that looks.", "--frequency-context-size", metavar="N")
]

Depth = Annotated[
    int | None,
    _option(_SPECULATION, "Tokens a round proposes; default: the draft's trained block.", "--depth", metavar="N"),
]
Plain = Annotated[bool, _option(_SPECULATION, "Run the target alone.", "--plain")]
Compare = Annotated[
    bool,
    _option(_SPECULATION, "Run plainly, then with the draft; print the ratio and whether texts agree.", "--compare"),
]

PrefillStepSize = Annotated[
    int, _option(_MEMORY, "Prompt tokens a forward pass takes.", "--prefill-step-size", metavar="N")
]
MaxKvSize = Annotated[
    int | None, _option(_MEMORY, "Keep only this many positions (rotating cache).", "--max-kv-size", metavar="N")
]
KvBits = Annotated[
    int | None, _option(_MEMORY, "Quantise the KV cache to 2, 3, 4, 5, 6 or 8 bits.", "--kv-bits", metavar="N")
]
KvGroupSize = Annotated[int, _option(_MEMORY, "Group size of that quantisation.", "--kv-group-size", metavar="N")]
QuantizedKvStart = Annotated[int, _option(_MEMORY, "Positions before it starts.", "--quantized-kv-start", metavar="N")]

ShowStats = Annotated[bool, _option(_OUTPUT, "Print a table of what happened, to stderr.", "--stats")]
Json = Annotated[bool, _option(_OUTPUT, "Print one JSON object at the end instead of the text.", "--json")]
