# rlctl on CPUs. A folder with specs, data and runs is mounted at /work:
#
#     docker build --tag rlctl .
#     docker run --rm --interactive --tty --shm-size 2g --volume "$PWD:/work" rlctl train my.toml
#
# Weights travel through /dev/shm: --shm-size holds a copy of the model.
FROM python:3.11-slim-bookworm

# bash and git for `rlctl setup-engine`, g++ for the extensions that torch and DeepSpeed compile when they are used.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bash g++ git \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_WAIT_POLICY=PASSIVE

WORKDIR /opt/rlctl
# Torch first, and alone: its layer stays when only rlctl changes. The index has builds for CPUs and nothing else.
COPY scripts/constraints.txt scripts/constraints.txt
RUN pip install --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' scripts/constraints.txt)"

COPY . .
RUN pip install --constraint scripts/constraints.txt ".[agents,mcp]"

RUN useradd --create-home --uid 1000 rlctl && mkdir /work && chown rlctl /work
USER rlctl
WORKDIR /work
ENTRYPOINT ["rlctl"]
CMD ["--help"]
