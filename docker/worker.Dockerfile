# The worker: SGLang with our plugin. LOCK=cpu for machines without a GPU, LOCK=gpu for NVIDIA hosts.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

ARG LOCK=cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PYTHONUNBUFFERED=1 ADAFLASH_CACHE=/var/cache/adaflash HF_HOME=/var/cache/adaflash/hf

# gcc: triton and torch compile small launchers at run time.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 adaflash \
 && mkdir -p /app /drafters /var/cache/adaflash/models /var/cache/adaflash/hf \
 && chown -R adaflash /app /drafters /var/cache/adaflash

USER 10001
WORKDIR /app
COPY --chown=adaflash requirements requirements
COPY --chown=adaflash scripts scripts
COPY --chown=adaflash pyproject.toml README.md ./
COPY --chown=adaflash adaflash adaflash
COPY --chown=adaflash serving serving
COPY --chown=adaflash trainer trainer
COPY --chown=adaflash demo demo
RUN python scripts/setup_env.py --kind "${LOCK}"

ENV PATH=/app/.venv/bin:$PATH
EXPOSE 30000 30001
VOLUME ["/drafters"]
# SGLang takes minutes to load a large target; the agent's /readyz turns 200 after its start-up proof.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=6 \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30001/readyz', timeout=4)"]
ENTRYPOINT ["adaflash"]
CMD ["worker", "--help"]
