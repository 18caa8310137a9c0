"""Write the secrets that docker-compose.yml mounts, once: python3 deploy/make_secrets.py."""

import secrets
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "secrets"
_REDIS_ACL = """\
user default on nopass resetkeys resetchannels -@all +ping
user kinlens on >{password} ~* resetchannels +@all -@admin -@dangerous +info
"""
_REDIS_URL = "redis://kinlens:{password}@redis:6379/0\n"


def main() -> None:
    """Write the missing secrets; existing ones are kept."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    password = secrets.token_hex(32)
    redis = {"redis.acl": _REDIS_ACL, "redis_url.txt": _REDIS_URL}
    wanted = {name: text.format(password=password) for name, text in redis.items()}
    if any((FOLDER / name).exists() for name in wanted):
        wanted = {}
    if not (FOLDER / "grafana_password.txt").exists():
        wanted["grafana_password.txt"] = secrets.token_hex(16) + "\n"
    FOLDER.chmod(0o700)
    for name, text in wanted.items():
        path = FOLDER / name
        path.write_text(text)
        path.chmod(0o444)  # containers run as other users; the folder (0700) excludes the rest
        sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
