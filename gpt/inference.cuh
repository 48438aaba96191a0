// The subcommands eval and sample, which load the weights of --from without optimizer states. Included by train_gpt.cu.
#pragma once

void load_for_inference(Model& m, const Options& o, const char* subcommand, Purpose purpose) {
    if (o.from.empty()) throw UserError("%s needs --from DIR, a folder with config.json and model.safetensors",
                                       subcommand);
    allocate(m, make_setup(o, read_config(o.from + "/config.json"), purpose, memory_now()));
    read_weights(m, o.from);
}

void eval(const Options& o) {
    if (o.data.empty() && o.hellaswag.empty()) throw UserError("eval needs --data PATTERN or --hellaswag FILE");
    Tokens tokens = o.data.empty() ? Tokens() : Tokens(o.data);
    Model m;
    load_for_inference(m, o, "eval", Purpose::INFERENCE);
    const bool needs_text = !o.data.empty() && tokens.bytes_only();
    const Text text = needs_text ? Text(o.from, m.config.vocab) : text_if_any(o.from, m.config.vocab);
    tokens.tokenize(text);
    if (o.given.count("--val-fraction")) tokens = tokens.split_tail(o.val_fraction);
    std::vector<Question> questions;
    if (!o.hellaswag.empty()) questions = read_questions(o.hellaswag, m.config.vocab, m.setup.T);
    const std::vector<int> zeros(m.setup.N());
    auto pass = [&] {
        forward(m, send_spare(m.a.inputs, zeros));
        head<Want::LOSS>(m, send_spare(m.a.targets, zeros), 0, m.setup.rows());
    };
    if (o.matmul_tuning) tune_matmuls(m, stderr, o.verbose, pass);   // stdout has only the result
    m.graphs.on = use_graphs(o);
    if (!o.data.empty()) {
        const Evaluation e = evaluate(m, tokens, 0, text);
        printf("loss %.6f over %zu tokens\nperplexity %.4f\n", e.loss, e.tokens, exp(e.loss));
        if (e.bytes)
            printf("bits per byte %.4f over %zu bytes%s\n", e.bits_per_byte(), e.bytes,
                   m.config.vocab == BYTE_VOCAB ? "" : "; special tokens such as <|endoftext|> have none");
        printf("%s tok/s\n", short_number(e.tokens / e.seconds).c_str());
    }
    if (!questions.empty()) printf("%s\n", hellaswag(m, questions).text.c_str());
}

void sample_subcommand(Options o) {
    o.micro_batch = 1;
    Model m;
    load_for_inference(m, o, "sample", Purpose::SAMPLING);
    const Text text(o.from, m.config.vocab);
    const std::vector<int> prompt = read_prompt(o, text, m.config.vocab);
    for (int i = 0; i < o.samples && !ferror(stdout); i++) {
        const uint64_t seed = static_cast<uint64_t>(o.seed) + i;
        if (o.samples > 1) printf("---- sample %d, seed %llu ----\n", i + 1, static_cast<unsigned long long>(seed));
        Printer printer(stdout);
        for (int token : prompt) printer.add(text.decode(token));
        printer.stop_at(o.stop);
        sample(m, prompt, o, seed, [&](int token) { return printer.add(text.decode(token)) && !ferror(stdout); });
        printer.end();
        printf("\n");
    }
}
