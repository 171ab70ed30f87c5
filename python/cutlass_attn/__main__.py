"""`python -m cutlass_attn`, and the command `cutlass-attn`."""

import sys

# What the extra `cli` requires. By name of the extra, pip would look for this package on its index.
REQUIREMENTS = ("click>=8.1", "nvidia-ml-py>=12", "rich>=13", "tomlkit>=0.12")


def main() -> int:
    try:
        from .tools import cli

        return cli.main()
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if not any(requirement.startswith(f"{name}>") for requirement in REQUIREMENTS):
            raise
        wanted = " ".join(f"'{requirement}'" for requirement in REQUIREMENTS)
        print(f"cutlass-attn: {name} is missing; pip install {wanted}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
