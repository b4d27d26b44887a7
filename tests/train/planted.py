"""Secrets of many forms, for tests that plant them. None of them is real.

Each is a text with a secret in it, and the part of the secret that must not be shown.
"""

_HEX = "0123456789abcdef"


def _letters(count: int) -> str:
    return ("PlantedSecretZ9" * 20)[:count]


def planted() -> dict[str, tuple[str, str]]:
    """Return (text, the secret in it) for the name of each form."""
    key = "PLANTED" + "K7Q2" * 4
    word = "Planted5ecret"
    secrets = {
        # URLs
        "s3 password": (f"s3://AKID:{word}@bucket/run", word),
        "s3 password with a slash": (f"s3://AKID:Pl/{word}+x@bucket/run", word),
        "password with signs": (f"postgres://me:a@b#{word}!@db:5432/x", word),
        "password with quotes": (f"https://me:a\"b'{word}@host/x", word),
        "token as a user": (f"https://{word}@github.com/x.git", word),
        "azure sas": (f"https://a.blob.core.windows.net/c?sv=1&sig={word}%3D", word),
        "azure sas alone": (f"sv=2024-01-01&ss=b&sig={word}%3D", word),
        "amazon signature": (f"https://b/x?X-Amz-Signature={word}&X-Amz-Date=1", word),
        "google signature": (f"https://b/x?X-Goog-Signature={word}", word),
        "query token": (f"https://h/x?a=b&access_token={word}#top", word),
        "query with escapes": (f"https://h/x?access%5Ftoken={word}", word),
        "fragment token": (f"https://h/x#id_token={word}", word),
        # addresses of webhooks
        "slack webhook": (f"https://hooks.slack.com/services/T0/B0/{word}", word),
        "discord webhook": (f"https://discord.com/api/webhooks/123/{word}", word),
        "teams webhook": (f"https://a.webhook.office.com/webhookb2/{word}@x", word),
        "telegram": (f"https://api.telegram.org/bot12:{word}/send", word),
        "own webhook": (f"https://chat.example.org/hooks/{word}{word}", word),
        # names
        "assignment": (f"export DB_PASSWORD={word}", word),
        "quoted": (f"DBPW='{word} and more'", word),
        "json": (f'{{"api_key": "{word}"}}', word),
        "python": (f"{{'privateKey': '{word}'}}", word),
        "yaml": (f"client_secret: {word}", word),
        "jwt name": (f"JWT={word}", word),
        "cookie name": (f"SESSION_COOKIE={word}", word),
        "private key name": (f"PRIVATEKEY={word}", word),
        "webhook name": (f"ALERT_WEBHOOK_URL=https://h/{word}", word),
        "account key": (f"AccountName=a;AccountKey={word}==;EndpointSuffix=x", word),
        "shared access key": (f"Endpoint=sb://a/;SharedAccessKey={word}=", word),
        "connection string": (f"Server=a;User Id=b;Password={word};", word),
        "flag": (f"wandb login --api-key {word}", word),
        "flag with equals": (f"mysql --password={word}", word),
        "default of a variable": (f"${{oc.env:API_KEY,{word}}}", word),
        # headers
        "bearer": (f"Authorization: Bearer {word}", word),
        "basic": (f"'Authorization': 'Basic {word}=='", word),
        "cookie": (f"Cookie: a={word}", word),
        "netrc": (f"machine h login me password {word}", word),
        # forms of keys
        "aws id": ("AKIA" + key[:16], key[:16]),
        "github": ("ghp_" + _letters(36), _letters(36)),
        "github fine": ("github_pat_" + _letters(60), _letters(60)),
        "gitlab": ("glpat-" + _letters(20), _letters(20)),
        "hugging face": ("hf_" + _letters(34), _letters(34)),
        "openai": ("sk-proj-" + _letters(48), _letters(48)),
        "anthropic": ("sk-ant-api03-" + _letters(60), _letters(60)),
        "slack": ("xoxb-12345-" + _letters(24), _letters(24)),
        "google": ("AIza" + _letters(35), _letters(35)),
        "google client": ("GOCSPX-" + _letters(28), _letters(28)),
        "stripe": ("sk_live_" + _letters(24), _letters(24)),
        "sendgrid": (f"SG.{_letters(22)}.{_letters(43)}", _letters(22)),
        "npm": ("npm_" + _letters(36), _letters(36)),
        "pypi": ("pypi-" + _letters(80), _letters(80)),
        "databricks": ("dapi" + _HEX * 2, _HEX),
        "vault": ("hvs." + _letters(30), _letters(30)),
        "jwt": (f"eyJ{_letters(20)}.eyJ{_letters(30)}.{_letters(20)}", _letters(20)),
        "pem": (
            f"-----BEGIN RSA PRIVATE KEY-----\n{_letters(40)}\n"
            "-----END RSA PRIVATE KEY-----",
            _letters(40),
        ),
        "pem on a line": (
            f"-----BEGIN OPENSSH PRIVATE KEY-----\\n{_letters(40)}\\n",
            _letters(40),
        ),
    }
    return secrets


PLANTED = planted()

# These texts look a little like secrets, and must stay readable.
READABLE = [
    *(
        "data.tokenizer=tiktoken_gpt2",
        "data.tokenizer: llama3",
        "tokens_per_second=123",
    ),
    *("tokens_per_second: 1,234", "tokenizer=/data/tokenizer.json", "bos_token='<s>'"),
    *("eos_token: <|endoftext|>", "data.path=/data/tokens/fineweb", "data=tokens"),
    *("run.name=llama3_1b-tokens-0123abcd", "runs/token_mixer-key/checkpoints/100"),
    *("schedule.warmup_tokens=1e9", "train.loss_chunk_tokens=4096", "num_tokens=12"),
    *("model.delta_key_heads=4", "model.experts_per_token=2", "key=value", "token=8"),
    *(
        "unknown key: data.path",
        "is not key=value",
        "keys: a, b",
        "password must be set",
    ),
    *("gs://bucket/a@b", "s3://bucket:1/x", "http://host:80/a@b", "a:b@c", "me@host"),
    *("http://localhost:5000/path", "https://h/x?page=2&sort=asc", "host:8476"),
    "commit 0123456789abcdef0123456789abcdef01234567",
    "sha256 " + _HEX * 4,
    "fingerprint=" + _HEX * 4,
    "model.init=scaled eval/bits_per_byte=0.73 loss=2.1e-05",
    "WARNING process 3 on node-12: no sign of 10.0.0.1:8476",
    "s3://bucket/secret-project/tokens, gs://auth/keys/x",
    "cluster.secrets={WANDB_API_KEY: WANDB_API_KEY}",
    "password=${oc.env:PASSWORD}",
    "gcloud secrets versions access latest --secret=wandb",
    "sky jobs launch --secret HF_TOKEN --secret wandb",
    "optimizer.groups=[{match: 'blocks.*.attention.key', learning_rate: 0.1}]",
    "mesh.params.embed=[fsdp,tensor]",
    "trained on 1,234 tokens: 5 documents",
    "git@github.com:me/repo.git",
    "task_id=12 session=3 pass=2 author=me",
    "2 tokens: the, cat; next token: sat",
]
