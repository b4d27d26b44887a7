# Longhaul in a container:
#
#   docker build --tag longhaul .                               # for CPUs
#   docker build --tag longhaul --build-arg PLATFORM=cuda .     # or tpu
#   docker run --user "$(id -u)" --volume "$PWD/runs:/runs" --stop-timeout 120 \
#       longhaul python -m longhaul train
#
# Any user may run it, by whatever number a cluster gives. SIGTERM reaches the run, which
# saves and ends with 42; an abort ends with 134. EXTRAS=s3,gcs,data also prepares data;
# BASE can be a tag with a digest, or a mirror's name for Debian 13.

ARG BASE=debian:13.7-slim

# ---- Libraries, and this program, installed where nothing else is
FROM $BASE AS build
ARG PLATFORM=cpu
ARG EXTRAS=s3,gcs
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# No versions: Debian keeps the newest of a release only.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /pip && python3 -m venv --without-pip /opt/venv
WORKDIR /source
ENV PIP_CONSTRAINT=/source/constraints.txt PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# Libraries change seldom, and are large: in a layer of their own, made without the code.
COPY pyproject.toml constraints.txt ./
COPY longhaul/wheel.py longhaul/
RUN touch README.md LICENSE \
    && if [ "$PLATFORM" = cpu ]; then extras="$EXTRAS"; else extras="$EXTRAS,$PLATFORM"; fi \
    && /pip/bin/pip --python /opt/venv/bin/python install ".[$extras]" \
    && /pip/bin/pip --python /opt/venv/bin/python uninstall --yes longhaul \
    && /pip/bin/pip --python /opt/venv/bin/python check \
    && { ! /pip/bin/pip --python /opt/venv/bin/python freeze \
        | grep --invert-match --line-regexp --fixed-strings --file constraints.txt; } \
    && echo /opt/longhaul > "$(echo /opt/venv/lib/python3.*/site-packages)/longhaul.pth"
COPY . .
RUN /pip/bin/pip install --no-deps --target /opt/longhaul .

# ---- What runs
FROM $BASE
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 tini \
    && rm -rf /var/lib/apt/lists/*
# Any user may write here, as in /tmp: runs, caches, and what a command leaves.
RUN mkdir --mode=1777 /runs /cache /workspace && ln -s /runs /workspace/runs
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/longhaul /opt/longhaul
ENV PATH=/opt/venv/bin:$PATH HOME=/cache XDG_CACHE_HOME=/cache PYTHONUNBUFFERED=1
WORKDIR /workspace
VOLUME /runs
USER 1000:0
# Process 1 is none that the kernel spares its own signals; it passes ours on, and
# collects the dead. -s: also where it is not process 1.
ENTRYPOINT ["/usr/bin/tini", "-s", "--"]
CMD ["python", "-P", "-m", "longhaul", "train"]
ARG REVISION=unknown
LABEL org.opencontainers.image.title="longhaul" \
      org.opencontainers.image.description="Pretrains GPT-style language models with JAX" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="$REVISION"
