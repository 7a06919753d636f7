"""Stand-in for the generation mixin, which is not in the source distribution: the few tests below are ours."""

import torch
from transformers import set_seed


class GenerationTesterMixin:
    """Every way to generate gives what the model's own logits say, step by step.

    Seeds are those of the test, so that two runs with different experts see the same weights and prompts.
    """

    max_new_tokens = 5

    def _generation(self, model_class):
        set_seed(0)
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        config.get_text_config().eos_token_id = None  # every sequence has all its tokens
        return model_class(config).eval(), inputs["input_ids"]

    def _generate(self, model, prompt, **options):
        torch.manual_seed(0)
        model.generation_config.eos_token_id = None
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self.max_new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )

    def test_greedy_tokens_are_the_best_of_a_whole_forward(self):
        for model_class in self.all_generative_model_classes:
            model, prompt = self._generation(model_class)
            for use_cache in (True, False):
                made = self._generate(model, prompt, do_sample=False, use_cache=use_cache)
                assert made.sequences.shape[1] == prompt.shape[1] + self.max_new_tokens
                with torch.no_grad():
                    whole = model(made.sequences).logits[:, prompt.shape[1] - 1 : -1]
                torch.testing.assert_close(torch.stack(made.logits, 1), whole, rtol=1e-3, atol=1e-3)

    def test_sampling_is_reproducible(self):
        for model_class in self.all_generative_model_classes:
            model, prompt = self._generation(model_class)
            one, two = (self._generate(model, prompt, do_sample=True, top_k=0) for _ in range(2))
            assert torch.equal(one.sequences, two.sequences)

    def test_beam_search_is_at_least_as_likely_as_its_own_logits_say(self):
        for model_class in self.all_generative_model_classes:
            model, prompt = self._generation(model_class)
            made = self._generate(model, prompt, do_sample=False, num_beams=3, length_penalty=0.0, output_scores=True)
            with torch.no_grad():
                whole = model(made.sequences).logits[:, prompt.shape[1] - 1 : -1].log_softmax(-1)
            chosen = made.sequences[:, prompt.shape[1] :, None]
            likely = whole.gather(2, chosen).sum((1, 2))
            torch.testing.assert_close(made.sequences_scores, likely, rtol=1e-3, atol=1e-3)

    def test_left_padding_changes_no_logits(self):
        for model_class in self.all_generative_model_classes:
            model, prompt = self._generation(model_class)
            padding = torch.zeros(prompt.shape[0], 4, dtype=torch.long)
            mask = torch.cat([padding, torch.ones_like(prompt)], 1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            with torch.no_grad():
                padded = model(torch.cat([padding, prompt], 1), attention_mask=mask, position_ids=positions).logits
                alone = model(prompt).logits
            torch.testing.assert_close(padded[:, -1], alone[:, -1], rtol=1e-4, atol=1e-4)

    def test_a_static_cache_gives_the_same_logits(self):
        for model_class in self.all_generative_model_classes:
            model, prompt = self._generation(model_class)
            if not model._can_compile_fullgraph:
                self.skipTest("the architecture has no static cache")
            dynamic = self._generate(model, prompt, do_sample=False)
            static = self._generate(model, prompt, do_sample=False, cache_implementation="static", disable_compile=True)
            torch.testing.assert_close(torch.stack(static.logits), torch.stack(dynamic.logits), rtol=1e-3, atol=1e-3)
