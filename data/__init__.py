"""Turn text into tokens, rows and batches, without using an accelerator."""

# Code outside this folder imports only these modules of it.
PUBLIC_MODULES = (
    "batch",
    "batches",
    "beginning",
    "catalog",
    "config",
    "config_rules",
    "encoding",
    "errors",
    "key_value_store",
    "machine",
    "names",
    "phases",
    "program",
    "rows",
    "sources",
    "storage",
    "text.files",
    "text.records",
    "text.streams",
    "tokenizer_folder",
    "tokenizer_json",
)
