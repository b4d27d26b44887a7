"""The list of rules by which `masking.py` recognises secrets.

The forms of keys are described by their issuers, and known to the scanners gitleaks,
detect-secrets and trufflehog; the expressions here are our own.
"""

import re

_BEFORE_KEY = """
    private api access account secret signing shared sharedaccess master encryption ssh
    auth license storage service client deploy host db gpg pgp rsa ssl tls subscription
    function primary secondary app consumer webhook hmac aes session admin root user
    server site write read ingest signature crypt cipher
"""
_KEY_OF = "|".join(_BEFORE_KEY.split())
_PASS_OF = "db|user|admin|root|my|pg|mysql|sql|redis|mongo|ftp|smtp|mail|ldap|proxy"
SECRET_WORD = re.compile(
    rf"""\w*(token|secret|password|passwd|passphrase|passcode|credential|cookie)s?
        |(\w*({_KEY_OF}))?keys?
        |({_PASS_OF})?(pass|pwd|pw)|\w{{1,8}}pwd
        |pat|auth|authorization|bearer|jwt|jws|otp|totp|salt|sas|dsn|creds?|sessionid
        |connectionstring|connstr|webhooks?""",
    re.IGNORECASE | re.VERBOSE,
)
# One of these words is clear without another word next to it.
STRONG_WORD = re.compile(
    rf"""token|secret|passw(or)?d|passphrase|passcode|credential|cookie|jwt|webhook
        |({_KEY_OF})_?-?key|({_PASS_OF})(pass|pwd|pw)(?![a-z])|(?<![a-z])pwd(?![a-z])
        |connection_?string""",
    re.IGNORECASE | re.VERBOSE,
)
LOCATION_SUFFIX = re.compile(r"[_-](file|path|dir|url|uri|host)$", re.IGNORECASE)
# Every shell sets the first two to folders.
NO_SECRETS = ("PWD", "OLDPWD")
# Words next to `token` and `key` in names that speak of a language model.
_NEXT_TO_TOKEN = """
    shift from batch base bos eos pad unk sep mask cls special beginning begin end stop
    next last first image prompt new max min num number total per of added chunk input
    output target vocab text ids count counts length seconds second warmup budget
    embedding embeddings type types seen trained steps step experts loss rate
    parallelism document start replace limit map
"""
_NEXT_TO_KEY = """
    heads head dim dims norm query value cache kv delta attention sort dictionary error
    states
"""
MODEL_QUALIFIERS = {
    "token": frozenset(_NEXT_TO_TOKEN.split()),
    "key": frozenset(_NEXT_TO_KEY.split()),
}
# A text without any of these, in lower case, has no secret's name and no header.
NAME_HINTS = (
    *("token", "secret", "pass", "pwd", "pw", "cred", "cookie", "key", "auth", "jw"),
    *("otp", "salt", "sas", "dsn", "webhook", "bearer", "basic", "conn", "pat"),
    *("sessionid", "login"),
)
# What stands where a value should, but is none.
NO_VALUE = re.compile(
    r"\*\*\*|\.\.\.|(?-i:[A-Z][A-Z0-9]*_[A-Z0-9_]*)|none|null|true|false|str|int"
    r"|[\d.,e+%-]+|\$.*|<.*|\w*\(.*|self\b.*"
    "|[\U000f0000-\U000ffffd].*",  # an interpolation, in masking.py
    re.IGNORECASE,
)

_SPACE = r"(?:[^\S\n]{0,3})"
_BARE = r"""[^\s"'`,;&|(){}\[\]<>\\]{4,}"""
_QUOTED = r"""(?<=")[^"\n]+|(?<=')[^'\n]+"""
# NAME=value, "NAME": "value", NAME: 'value'; the name may be the last part of a key.
ASSIGNMENT = re.compile(
    rf"""(?<![\w?&])(?P<name>[A-Za-z][\w-]{{1,63}})\\?["']?{_SPACE}(?:=|:(?!//|:)){_SPACE}
        \\?["']?(?P<value>{_QUOTED}|{_BARE})""",
    re.VERBOSE,
)
FLAG = re.compile(
    rf"""(?<![\w-])--?(?P<name>[A-Za-z][\w-]{{1,63}})[^\S\n]+["']?
        (?P<value>(?!-){_BARE})""",
    re.VERBOSE,
)
HEADER = re.compile(
    r"""(\b(?:proxy-)?authorization["']?\s{0,3}[:=]\s{0,3}["']?
        (?:basic|bearer|digest|token|negotiate|apikey)?\s{0,3}
        |\b(?:bearer|basic)\s+(?=[\w+/=.~-]{16})
        |\b(?:set-)?cookie["']?\s{0,3}[:=]\s{0,3}["']?
        |\blogin\s+\S+\s+password\s+)
        (?!\*\*\*|\$|(?:basic|bearer|digest|token|negotiate|apikey)\s)
        [^\s"'\\]{6,}""",
    re.IGNORECASE | re.VERBOSE,
)
# The password may hold any character; digits before a slash are a port.
URL_PASSWORD = re.compile(
    r"""([A-Za-z][\w+.-]*://[^\s/:@?#]*:)(?!\d+(?:[/?\#\s"']|$))
        (?:(?!://)\S)+(?=@)""",
    re.VERBOSE,
)
URL_TOKEN = re.compile(r"(?<=://)[^\s/:@?#]{8,}(?=@)")  # https://<token>@host
URL_PARAMETER = re.compile(
    r"""(?P<before>[?&;#]|(?<![^\s"'=,{\[(])(?=sig=))
        (?P<name>[\w.%-]+)=(?P<value>(?!\*\*\*)[^\s&#"';,)}\]]+)""",
    re.VERBOSE,
)

# Each form is a key by itself: its expression, and words of which its texts hold one. A
# group keeps the part that is no secret.
_FORMS: dict[str, tuple[str, ...]] = {
    # PEM blocks, also with `\n` in place of line breaks
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?"
    r"(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\Z)": ("PRIVATE KEY",),
    r"AGE-SECRET-KEY-1[0-9A-Z]{20,}": ("AGE-",),
    # JSON Web Tokens
    r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?": ("eyJ",),
    # webhooks: the address is the secret
    r"(https?://hooks\.slack\.com/)[\w/-]{8,}": ("hooks.slack",),
    r"(https?://(?:\w+\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/)[\w/-]+": (
        "discord",
    ),
    r"(https?://[\w.-]+\.webhook\.office\.com/)[^\s\"']+": ("webhook.office",),
    r"(https?://hooks\.zapier\.com/hooks/)[\w/-]+": ("zapier",),
    r"(https?://api\.telegram\.org/(?:file/)?bot)[\w:-]+": ("telegram",),
    r"(https?://[^\s/\"']+/(?:\w+/){0,6}?(?:web)?hooks?/)[\w/-]{16,}": ("hook",),
    r"(https?://maker\.ifttt\.com/trigger/\w+/(?:json/)?with/key/)[\w-]+": ("ifttt",),
    r"\b\d{8,10}:AA[\w-]{32,}": (":AA",),
    # Amazon
    r"\b(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}\b": (
        *("AKIA", "ASIA", "ABIA", "ACCA", "A3T"),
    ),
    r"\bABSK[\w+/=]{60,}": ("ABSK",),
    # GitHub, GitLab, Bitbucket, Atlassian
    r"\bgh[pousr]_[A-Za-z0-9]{20,}": ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
    r"\bgithub_pat_\w{20,}": ("github_pat_",),
    r"\bgl(?:pat|dt|rt|rtr|ptt|cbt|ft|imt|agent|soat|ffct)-[\w.-]{16,}": ("gl",),
    r"\bAT(?:ATT|BB|CTT)[\w=-]{24,}": ("ATATT", "ATBB", "ATCTT"),
    # machine learning
    r"\bhf_[A-Za-z0-9]{20,}": ("hf_",),
    r"\bapi_org_[A-Za-z0-9]{20,}": ("api_org_",),
    r"\bwandb_v\d_\w{16,}": ("wandb_v",),
    r"\bsk-(?:proj-|ant-|or-|svcacct-|admin-)?[\w-]{20,}": ("sk-",),
    r"\b(?:gsk|r8|nvapi|xai|pplx|fw|tvly|cpk)[_-][\w-]{24,}": (
        *("gsk", "r8", "nvapi", "xai", "pplx", "fw", "tvly", "cpk"),
    ),
    r"\bKGAT_[0-9a-f]{32}": ("KGAT_",),
    # chat
    r"\bxox[a-z]-[\w-]{10,}": ("xox",),
    r"\bxapp-\d-[\w-]{10,}": ("xapp",),
    # Google
    r"\bAIza[\w-]{35}": ("AIza",),
    r"\bya29\.[\w.-]{20,}": ("ya29.",),
    r"\bGOCSPX-[\w-]{20,}": ("GOCSPX",),
    r"(?<![\w/])1//0[\w-]{20,}": ("1//0",),
    # Microsoft
    r"(?<![\w~.-])[\w.-]{3}\dQ~[\w.~-]{31,34}": ("Q~",),
    # packages and containers
    r"\bnpm_[A-Za-z0-9]{30,}": ("npm_",),
    r"\bpypi-[\w-]{50,}": ("pypi-",),
    r"\bdckr_(?:pat|oat)_[\w-]{20,}": ("dckr_",),
    r"\brubygems_[0-9a-f]{40,}": ("rubygems_",),
    # clouds and services
    r"\bdo[opr]_v1_[0-9a-f]{40,}": ("_v1_",),
    r"\bdapi[0-9a-f]{32}\b": ("dapi",),
    r"\bhv[sbr]\.[\w-]{20,}": ("hvs.", "hvb.", "hvr."),
    r"\bgl(?:sa|c)_[\w+/=]{20,}": ("glsa_", "glc_"),
    r"\b[rs]k_(?:live|test|prod)_[A-Za-z0-9]{10,}": ("k_",),
    r"\bwhsec_[\w+/=]{16,}": ("whsec_",),
    r"\bSG\.[\w-]{16,}\.[\w-]{16,}": ("SG.",),
    r"\bSK[0-9a-f]{32}\b": ("SK",),
    r"\bkey-[0-9a-f]{32}\b": ("key-",),
    r"\bshp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}": ("shp",),
    r"\bsq0(?:atp|csp|idp)-[\w-]{22,}": ("sq0",),
    r"\bEAAA[\w-]{50,}": ("EAAA",),
    r"\blin_api_\w{30,}": ("lin_api_",),
    r"\b(?:secret|ntn)_[A-Za-z0-9]{40,}": ("secret_", "ntn_"),
    r"\bpul-[0-9a-f]{40}\b": ("pul-",),
    r"\btskey-\w+-[\w-]{10,}": ("tskey",),
    r"\bdp\.(?:pt|st|ct)\.[\w.-]{30,}": ("dp.",),
    r"\bPMAK-[0-9a-f]{24}-[0-9a-f]{34}": ("PMAK",),
    r"\bNRAK-[A-Z0-9]{27}": ("NRAK",),
    r"\bsntry[su]_[\w+/=.-]{30,}": ("sntry",),
    r"\bFlyV1 fm\d_[\w+/=,-]{30,}": ("FlyV1",),
}
FORMS = [(re.compile(form), hints) for form, hints in _FORMS.items()]
