"""Which objectives train a model, and which one if its recipe names none."""

from regard.kinds import OBJECTIVES
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.dual_encoder import DualEncoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.generative.autoencoder import Autoencoder
from regard.models.generative.gan import GAN
from regard.models.generative.vae import VAE
from regard.models.heads import Classification, Distilled, MaskedLM, Pooled, PreTraining
from regard.models.interleaved import Interleaved
from regard.objectives.base import Objective, PairError, describe_model
from regard.objectives.bert_pretraining import BertPretraining
from regard.objectives.classification import SequenceClassification, TokenClassification
from regard.objectives.contrastive import Contrastive
from regard.objectives.embeddings import SentenceEmbeddings
from regard.objectives.gan import Adversarial
from regard.objectives.image_text import ImageText
from regard.objectives.masked import MaskedTokens
from regard.objectives.next_token import NextToken
from regard.objectives.reconstruction import Reconstruction, Variational
from regard.objectives.translation import Translation
from regard.spec import Spec, SpecError, class_of


def default_objective(model: Model) -> Objective:
    match model:
        case Decoder():
            return NextToken()
        case EncoderDecoder():
            return Translation()
        case Encoder(head=Classification(pool="none")):
            return TokenClassification()
        case Encoder(head=MaskedLM()):
            return MaskedTokens()
        case Encoder(head=PreTraining()):
            return BertPretraining()
        case Encoder(head=Classification() | Distilled()):
            return SequenceClassification()
        case Encoder(head=Pooled()):
            return SentenceEmbeddings()
        case DualEncoder():
            return Contrastive()
        case Interleaved():
            return ImageText()
        case Autoencoder():
            return Reconstruction()
        case VAE():
            return Variational()
        case GAN():
            return Adversarial()
    raise PairError(f"this model is {describe_model(model)}; {remedy(model)}")


def check_pair(objective: Objective, model: Model) -> None:
    """Raise SpecError if the model cannot be trained with the objective, with the objectives that can train it."""
    try:
        objective.check_model(model)
    except PairError as error:
        raise PairError(f"{error}; {remedy(model)}") from None


def remedy(model: Model) -> str:
    fitting = fitting_objectives(model)
    another_head = "head.kind if the recipe has `from`, else model.head.kind"
    if not fitting:
        return f"give it {'a' if getattr(model, 'head', None) is None else 'another'} head: set {another_head}"
    others = ""
    if isinstance(model, Encoder):
        others = f", or give it another head: set {another_head}"
    elif isinstance(model, Decoder):
        others = ", or start from it with a new head (`from` and [head])"
    return f"set objective.kind to one that trains it ({', '.join(fitting)}){others}"


def fitting_objectives(model: Model) -> list[str]:
    """The kinds of objectives that train models of this kind; some may need other settings of the model."""
    return [kind for kind in OBJECTIVES if fits(class_of(kind, "objective.kind", Objective)(), model)]


def fits(objective: Spec, model: Model) -> bool:
    assert isinstance(objective, Objective)
    try:
        objective.check_model(model)
    except PairError:
        return False
    except SpecError:
        pass
    return True
