"""Llama 2 and 3: dense layers, llama3 rotary scaling, small ones with tied heads."""

from jaxspec.models.family import Family

FAMILY = Family(model_type="llama", qkv_bias="attention_bias", out_bias="attention_bias")
