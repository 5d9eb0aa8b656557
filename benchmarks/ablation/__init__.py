"""`make ablation`: what each choice of the distillation is worth on a real small LM and real prompts."""
