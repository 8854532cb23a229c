"""The loaders of training frameworks, built by their own code, each in a process that is killed and starts again.

torchtitan, TransferQueue and verl are those that are installed. The code of others is in a checkout that a variable
names; where none does, its tests skip: ASYNCDATA_MEGATRON_BRIDGE, ASYNCDATA_MILES, ASYNCDATA_NEMO_RL,
ASYNCDATA_OPENRLHF, ASYNCDATA_PRIME_RL (with ASYNCDATA_VERIFIERS), ASYNCDATA_SKYRL and ASYNCDATA_AXOLOTL.
"""
