"""The objective that a model is trained with if its recipe names none."""

from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.dual_encoder import DualEncoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.heads import Classification, Distilled, MaskedLM, Pooled, PreTraining
from regard.objectives.base import Objective
from regard.objectives.bert_pretraining import BertPretraining
from regard.objectives.classification import SequenceClassification, TokenClassification
from regard.objectives.contrastive import Contrastive
from regard.objectives.embeddings import SentenceEmbeddings
from regard.objectives.masked import MaskedTokens
from regard.objectives.next_token import NextToken
from regard.objectives.translation import Translation
from regard.spec import SpecError


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
    raise SpecError(f"there is no default objective for this {model.kind}; set objective.kind")
