"""Model families: a short module each, with functions from a `config.json` to a `ModelSpec`.

A new family is a module here and a line in `FAMILIES`. A module is imported when a configuration names its family.
"""

FAMILIES = """
bert.bert               bert
bert.roberta            roberta xlm-roberta
clip.clip               clip CLIPModel
clip.siglip             siglip SiglipModel siglip2 Siglip2Model
cohere.cohere           cohere CohereForCausalLM
cohere.cohere2          cohere2 Cohere2ForCausalLM
deepseek.deepseek_v2    deepseek_v2 DeepseekV2ForCausalLM
deepseek.deepseek_v3    deepseek_v3 kimi_k2 glm4_moe_lite DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM KimiK2ForCausalLM
deepseek.deepseek_v32   deepseek_v32 DeepseekV32ForCausalLM
deepseek.kimi_k25       kimi_k25 Kimi_K25ForConditionalGeneration KimiK25ForConditionalGeneration
exaone.exaone4          exaone4 Exaone4ForCausalLM
falcon_h1.falcon_h1     falcon_h1 FalconH1ForCausalLM
gemma.gemma             gemma GemmaForCausalLM
gemma.gemma2            gemma2 Gemma2ForCausalLM
gemma.gemma3_text       gemma3_text Gemma3ForCausalLM
gemma.gemma3            gemma3 Gemma3ForConditionalGeneration
gemma3n.gemma3n_text    gemma3n_text Gemma3nForCausalLM
gemma3n.gemma3n         gemma3n Gemma3nForConditionalGeneration
gemma4.gemma4_text      gemma4_text Gemma4ForCausalLM
gemma4.gemma4           gemma4 Gemma4ForConditionalGeneration
glm_moe.glm             glm GlmForCausalLM
glm_moe.glm4            glm4 Glm4ForCausalLM
glm_moe.glm4_moe        glm4_moe Glm4MoeForCausalLM
glm_moe.glm4v           glm4v Glm4vForConditionalGeneration
glm_moe.glm46v          glm46v Glm46VForConditionalGeneration
glm_moe.glm4v_moe       glm4v_moe Glm4vMoeForConditionalGeneration
glm_moe.dots1           dots1 Dots1ForCausalLM
gpt_neox.gpt_neox       gpt_neox GPTNeoXForCausalLM
gpt_oss.gpt_oss         gpt_oss GptOssForCausalLM
granite.granite         granite GraniteForCausalLM
granite.granitemoe      granitemoe GraniteMoeForCausalLM
granite.granitemoehybrid granitemoehybrid GraniteMoeHybridForCausalLM
hunyuan.hunyuan_v1_dense hunyuan_v1_dense HunYuanDenseV1ForCausalLM
idefics.idefics3        idefics3 Idefics3ForConditionalGeneration smolvlm SmolVLMForConditionalGeneration
internvl.internvl       internvl InternVLForConditionalGeneration
internvl.internvl_chat  internvl_chat InternVLChatModel
lfm2.lfm2               lfm2 Lfm2ForCausalLM
lfm2.lfm2_moe           lfm2_moe Lfm2MoeForCausalLM
llama.llama             llama LlamaForCausalLM internlm3 InternLM3ForCausalLM
mistral.mistral           mistral MistralForCausalLM ministral MinistralForCausalLM
mistral.ministral3        ministral3 Ministral3ForCausalLM
mistral.mistral3          mistral3 Mistral3ForConditionalGeneration
llama.cwm               cwm CwmForCausalLM
llama.arcee             arcee ArceeForCausalLM
llama.helium            helium HeliumForCausalLM
llama.ernie4_5          ernie4_5 Ernie4_5ForCausalLM
llama.seed_oss          seed_oss SeedOssForCausalLM
llava.llava             llava LlavaForConditionalGeneration llava_next LlavaNextForConditionalGeneration
minimax.minimax_m2      minimax_m2 MiniMaxM2ForCausalLM
mistral.mixtral           mixtral MixtralForCausalLM
bert.modernbert         modernbert
nemotron.nemotron       nemotron NemotronForCausalLM
nemotron_h.nemotron_h   nemotron_h NemotronHForCausalLM
olmo.olmo               olmo OlmoForCausalLM
olmo.olmo2              olmo2 Olmo2ForCausalLM
olmo.olmo3              olmo3 Olmo3ForCausalLM
olmo.olmoe              olmoe OlmoeForCausalLM
phi.phi                 phi PhiForCausalLM
phi.phi3                phi3 Phi3ForCausalLM
qwen.qwen2              qwen2 Qwen2ForCausalLM
qwen.qwen3              qwen3 Qwen3ForCausalLM
qwen.qwen3_classifier   Qwen3ForSequenceClassification
qwen.qwen2_moe          qwen2_moe Qwen2MoeForCausalLM
qwen.qwen3_moe          qwen3_moe Qwen3MoeForCausalLM
qwen_hybrid.qwen3_next  qwen3_next Qwen3NextForCausalLM
qwen_hybrid.qwen3_5_text qwen3_5_text Qwen3_5ForCausalLM
qwen_hybrid.qwen3_5_moe_text qwen3_5_moe_text Qwen3_5MoeForCausalLM
qwen_hybrid.qwen3_5     qwen3_5 Qwen3_5ForConditionalGeneration
qwen_hybrid.qwen3_5_moe qwen3_5_moe Qwen3_5MoeForConditionalGeneration
qwen_vl.qwen2_5_vl      qwen2_vl Qwen2VLForConditionalGeneration qwen2_5_vl Qwen2_5_VLForConditionalGeneration
qwen_vl.qwen3_vl        qwen3_vl Qwen3VLForConditionalGeneration
qwen_vl.qwen3_vl_moe    qwen3_vl_moe Qwen3VLMoeForConditionalGeneration
llama.smollm3           smollm3 SmolLM3ForCausalLM
stablelm.stablelm       stablelm StableLmForCausalLM
starcoder2.starcoder2   starcoder2 Starcoder2ForCausalLM
"""
"""A line for each family: module and function, the model type, and other names that a configuration may have for it."""


def own_families() -> dict[str, str]:
    """The function of each model type and architecture, as `module:function`. The model type comes first."""
    lines = (line.split() for line in FAMILIES.strip().splitlines())
    return {name: f"{__name__}.{where.replace('.', ':')}" for where, *names in lines for name in names}
