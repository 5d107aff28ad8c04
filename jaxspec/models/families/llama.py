"""Llama 2 and 3: dense layers, llama3 rotary scaling, small ones with tied heads."""

from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(model_type="llama", mixer=GqaRow(qkv_bias="attention_bias", out_bias="attention_bias", windows="none"))
