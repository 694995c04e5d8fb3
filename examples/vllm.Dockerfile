# An image of vLLM whose servers can follow a store. In a clone:
#
#     docker build -f examples/vllm.Dockerfile -t vllm-dbuffer .
#
# For another version: --build-arg VLLM_IMAGE=vllm/vllm-openai:TAG
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM python:3.12-slim AS built
COPY pyproject.toml README.md LICENSE /src/
COPY dbuffer /src/dbuffer
RUN python3 -m pip wheel --no-deps --wheel-dir /wheels /src

FROM ${VLLM_IMAGE}
COPY --from=built /wheels /wheels
# The image's torch stays as it is; if dbuffer needs another one, the build fails.
RUN python3 -c "from importlib.metadata import version; print('torch==' + version('torch'))" > /tmp/installed.txt
RUN python3 -m pip install --no-cache-dir --constraint /tmp/installed.txt \
    "$(echo /wheels/dbuffer-*.whl)[cli,delta]"
RUN python3 -c "from dbuffer.integrations.vllm import FollowStore"
# For the recipes (docs/recipes.md); your trainer may need another image.
COPY examples/trainer.py /examples/
