"""`regard export`: write a model for `transformers` (a folder) or llama.cpp (a GGUF file), or an adapter for PEFT."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from regard.cli.open_model import ModelArgument

GGUFFormat = Literal[  # that of regard.checkpoint.gguf, whose import takes long
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0",
    "iq4_nl", "iq4_xs", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
]  # fmt: skip

if TYPE_CHECKING:
    from rich.console import Console
    from torch.nn import Module


def export(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder or FILE.gguf to write; must not exist.")],
    family: Annotated[
        str | None,
        typer.Option(help="The family to write, by its model_type; by default that of the source, else one that fits."),
    ] = None,
    gguf: Annotated[
        GGUFFormat | None,
        typer.Option(
            help="Number format of the matrices in a GGUF file, by llama.cpp's names; f16 by default. Bits per weight: "
            "q8_0 8.5, q6_k 6.6, q4_k_m about 4.8.",
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge an adapter into its model and write the whole model.")
    ] = False,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Write quantized layers as ordinary weights with the same numbers.")
    ] = False,
) -> None:
    """Write a model as a Hugging Face folder or a GGUF file. Of a run with an adapter, the adapter is written for PEFT.

    \b
    Examples:
      regard export runs/mine exported
      regard export runs/mine mine.gguf --gguf q4_k_m
      regard export runs/tuned adapter
      regard export runs/tuned merged --merge
      regard export models/mine-int4 exported
    """
    from rich.console import Console

    from regard.adapt.adapters import merge_lora
    from regard.adapt.peft import has_head
    from regard.adapt.quantized import dequantize_linears
    from regard.checkpoint.atomic_folder import check_new
    from regard.checkpoint.gguf import export_gguf
    from regard.checkpoint.model_folder import export as write
    from regard.checkpoint.model_folder import read_extra_files, read_source_family
    from regard.checkpoint.sentence_transformers import without_sentence_head
    from regard.cli.open_model import loading_bar, model_folder
    from regard.families import can_express, detect_family
    from regard.models.base import Model
    from regard.models.decoder import Decoder
    from regard.text.tokenizer import Tokenizer
    from regard.text.tokenizer_folder import has_tokenizer
    from regard.text.write_gguf import gguf_metadata
    from regard.training.base_model import base_of, load_model, root_of

    check_new(out)
    if gguf and out.suffix != ".gguf":
        raise ValueError(f"--gguf {gguf} is for GGUF files, and {out} is the name of a folder; name it {out}.gguf")
    console, folder = Console(stderr=True), model_folder(model)
    base, root = base_of(folder), root_of(folder)
    if merge and base is None:
        raise ValueError(f"{model} has no adapter to merge; omit --merge")
    with loading_bar(console, f"reading {folder}") as progress:
        network = load_model(folder, checked=folder != model, progress=progress)
    tokenizer = Tokenizer.load(root) if has_tokenizer(root) else None
    spec = network.spec
    assert isinstance(spec, Model), f"a model has a spec; found {spec!r:.80}"
    bare, source = without_sentence_head(spec), read_source_family(root)
    if base is not None and not merge and out.suffix != ".gguf":
        write_peft_adapter(network, out, family or source or detect_family(bare), base, has_head(folder), console)
        return
    if family is None:  # that of the source, unless it has no class with the new head
        family = source if source is not None and can_express(source, bare) else detect_family(bare)
    if base is not None:
        merge_lora(network)
    if dequantize:
        dequantize_linears(network)
    if out.suffix == ".gguf":
        vocabulary = gguf_metadata(tokenizer, spec.vocab) if tokenizer and isinstance(spec, Decoder) else None
        with loading_bar(console, f"writing {out}") as progress:
            export_gguf(network, out, family, gguf or "f16", vocabulary, progress)
        reader = "llama.cpp"
    else:
        write(network, out, family, tokenizer, read_extra_files(root))
        reader = "transformers"
    console.print(f"{out} is a {family} model for {reader}", soft_wrap=True)


def write_peft_adapter(
    network: "Module", out: Path, family: str, base: Path, with_head: bool, console: "Console"
) -> None:
    """with_head: the head was trained beside the adapter."""
    from regard.adapt.foreign_adapters import export_adapter
    from regard.adapt.targets import AdapterError
    from regard.checkpoint.atomic_folder import write_folder
    from regard.checkpoint.sentence_transformers import without_sentence_head
    from regard.families import FamilyError, family_config, weight_table
    from regard.find_model import kind_of_model
    from regard.models.base import Model
    from regard.models.heads import Classification

    spec, config = network.spec, {}
    assert isinstance(spec, Model), f"a model has a spec; found {spec!r:.80}"
    if with_head:
        spec = without_sentence_head(spec)
        try:
            config = family_config(family, spec)
        except FamilyError as error:
            raise AdapterError(
                f"PEFT adapts the classes of transformers, and none of {family} models has this head ({error}); write "
                "the whole model, if another family has one: regard export --merge, or use the run as it is"
            ) from error
    with write_folder(out) as temporary:
        export_adapter(network, temporary, weight_table(spec, family), base=str(base), with_head=with_head)
    console.print(f"{out} is an adapter for PEFT, of the {family} model {base}", soft_wrap=True)
    if with_head and isinstance(head := getattr(spec, "head", None), Classification):
        options = f"num_labels={head.labels}" + ("" if head.pad is None else f", pad_token_id={head.pad}")
        console.print(f"its base is {config['architectures'][0]}.from_pretrained(…, {options})", soft_wrap=True)
    if not (kind_of_model(base) or "").startswith("a Hugging Face folder"):
        merged = " --merge" if (base / "adapter_config.json").is_file() else ""
        console.print(
            f"transformers does not read {base}; write it with: regard export {base} FOLDER{merged}", soft_wrap=True
        )
