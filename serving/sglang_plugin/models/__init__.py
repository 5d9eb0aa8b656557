"""Model classes that SGLang registers through `SGLANG_EXTERNAL_MODEL_PACKAGE`."""
