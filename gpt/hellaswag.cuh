// HellaSwag: questions with a context and four endings, one of which is the original continuation (Zellers et al. 2019,
// "HellaSwag: Can a Machine Really Finish Your Sentence?"). The model's answer is the ending with the lowest loss given
// the context: the sum over its tokens (accuracy), or their mean, which does not favour short endings (acc_norm). With
// the mean, as in llm.c, GPT-2 124M answers 29.55 % of 10,042 correctly; other programs divide by bytes, not tokens.
//
// The file format is llm.c's, little-endian; scripts/prepare_hellaswag.py writes it:
//
//     256 int32   header: magic 20240522, version 1, number of questions, bytes of the longest question, zeros
//     uint16      per question: 65535, size in bytes, index, label, number of endings; then the context and each
//                 ending, as a number of tokens followed by the tokens
#pragma once

constexpr int QUESTIONS_HEADER = 256, QUESTIONS_MAGIC = 20240522, QUESTIONS_VERSION = 1, QUESTION_BEGINS = 65535;

struct Question {
    int label;
    std::vector<int> context;
    std::vector<std::vector<int>> endings;
};

// ---- reading ------------------------------------------------------------------------------------

// Reads the questions of a file in order, for a model with V tokens and at most T inputs.
struct QuestionReader {
    MappedFile file;
    int V, T, count = 0, index = 0;
    size_t at = QUESTIONS_HEADER * sizeof(int);   // position in bytes

    [[noreturn]] void fail(const std::string& what) const {
        throw UserError("%s: question %d: %s", file.path().c_str(), index, what.c_str());
    }
    void require(const char* what, int found, int expected) const {
        if (found != expected) fail(format("%s is %d, expected %d: damaged", what, found, expected));
    }
    int word() {
        uint16_t value;
        if (at + sizeof(value) > file.size()) fail(format("the file ends within it, of %d: truncated", count));
        memcpy(&value, file.data() + at, sizeof(value));
        at += sizeof(value);
        return value;
    }
    std::vector<int> tokens(const std::string& part) {
        std::vector<int> tokens(word());
        if (tokens.empty()) fail("no tokens in " + part);
        for (int& token : tokens)
            if (token = word(); token >= V)
                fail(format("token %d in %s is outside the vocabulary of %d", token, part.c_str(), V));
        return tokens;
    }
    Question next() {
        const size_t begin = at;
        require("its first number", word(), QUESTION_BEGINS);
        const int bytes = word();
        require("its index", word(), index);
        Question question = {word(), {}, {}};
        const int endings = word();
        if (question.label >= endings) fail(format("label %d, but %d endings", question.label, endings));
        question.context = tokens("the context");
        for (int e = 0; e < endings; e++) {
            question.endings.push_back(tokens(format("ending %d", e)));
            // The last token is only a target, not an input.
            const size_t inputs = question.context.size() + question.endings.back().size() - 1;
            if (inputs > static_cast<size_t>(T))
                fail(format("the context and ending %d have %zu tokens, expected at most %d: sequences of %d "
                            "(--seq-len), and the last token", e, inputs + 1, T + 1, T));
        }
        require("the size in bytes", static_cast<int>(at - begin), bytes);
        return question;
    }
};

std::vector<Question> read_questions(const std::string& path, int V, int T) {
    QuestionReader reader = {MappedFile(path), V, T};
    int header[QUESTIONS_HEADER];
    if (reader.file.size() < sizeof(header))
        throw UserError("%s: expected a header of %zu bytes, found %zu bytes", path.c_str(), sizeof(header),
                        reader.file.size());
    memcpy(header, reader.file.data(), sizeof(header));
    if (header[0] != QUESTIONS_MAGIC || header[1] != QUESTIONS_VERSION || header[2] < 1)
        throw UserError("%s: expected magic %d, version %d and questions, as scripts/prepare_hellaswag.py writes; "
                        "found magic %d, version %d, %d questions", path.c_str(), QUESTIONS_MAGIC,
                        QUESTIONS_VERSION, header[0], header[1], header[2]);
    reader.count = header[2];
    std::vector<Question> questions;
    for (; reader.index < reader.count; reader.index++) questions.push_back(reader.next());
    reader.file.require_whole();
    if (const size_t left = reader.file.size() - reader.at)
        throw UserError("%s: expected its end after %d questions, found %zu bytes more", path.c_str(), reader.count,
                        left);
    return questions;
}

// ---- losses -------------------------------------------------------------------------------------

// Sequences are batched by length and padded to the longest of their batch, rounded up to a multiple of LENGTH_STEP, so
// that there are few matmul shapes and few padding tokens.
constexpr size_t LENGTH_STEP = 8;

// [question][ending]: the loss summed over the ending's tokens.
typedef std::vector<std::vector<double>> EndingLosses;

// One sequence of inputs: a question's context and one ending, without the last token.
struct Sequence { size_t question, ending, length; };

// Returns the losses of the B sequences `rows`, summed over this rank's rows, in one forward pass of B x T tokens.
std::vector<double> batch_losses(Model& m, const std::vector<Question>& questions, const Sequence* rows, size_t B,
                                 size_t T) {
    std::vector<int> inputs(B * T, 0), targets(B * T, -1);   // attention is causal: padding has no effect
    for (size_t b = 0; b < B; b++) {
        const Question& question = questions[rows[b].question];
        const std::vector<int>& ending = question.endings[rows[b].ending];
        const auto next = std::copy(question.context.begin(), question.context.end(), inputs.begin() + b * T);
        std::copy(ending.begin(), ending.end() - 1, next);
        std::copy(ending.begin(), ending.end(), targets.begin() + b * T + question.context.size() - 1);
    }
    forward(m, send_spare(m.a.inputs, inputs), {static_cast<int>(B), static_cast<int>(T)});
    const size_t R = B * T / tensor_ranks.size, first = tensor_ranks.rank * R;
    head<Want::LOSS>(m, send_spare(m.a.targets, targets), 0, R);
    std::vector<float> losses(R);   // 0 where there is no target
    download(losses.data(), m.a.losses(), losses.size() * sizeof(float));
    std::vector<double> sums(B);
    for (size_t i = 0; i < R; i++) sums[(first + i) / T] += losses[i];
    return sums;
}

// Returns the losses of all endings; tensor groups compute different batches of B x T <= m.setup.N() tokens.
EndingLosses ending_losses(Model& m, const std::vector<Question>& questions) {
    EndingLosses result;
    std::vector<Sequence> rows;
    for (size_t q = 0; q < questions.size(); q++) {
        result.emplace_back(questions[q].endings.size());
        for (size_t e = 0; e < questions[q].endings.size(); e++)
            rows.push_back({q, e, questions[q].context.size() + questions[q].endings[e].size() - 1});
    }
    std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.length > b.length; });
    struct Chunk { size_t first, B, T; };
    std::vector<Chunk> batches;
    for (size_t first = 0, B = 0; first < rows.size(); first += B) {
        const size_t step = LENGTH_STEP * tensor_ranks.size;
        const size_t T = std::min<size_t>(m.setup.T, ceil_div(rows[first].length, step) * step);
        B = std::min({rows.size() - first, m.setup.N() / T, static_cast<size_t>(MAX_SEQUENCES)});
        batches.push_back({first, B, T});
    }
    // Group r of R computes batches r, r + R, ... A group without a batch in the last round computes the last batch
    // again, because all ranks must take part in the communication of a forward pass.
    std::vector<double> sums(rows.size());
    for (size_t round = 0; round < batches.size(); round += data_ranks.size) {
        const bool is_mine = round + data_ranks.rank < batches.size();
        const auto [first, B, T] = batches[is_mine ? round + data_ranks.rank : batches.size() - 1];
        const std::vector<double> losses = batch_losses(m, questions, &rows[first], B, T);
        if (is_mine) std::copy(losses.begin(), losses.end(), sums.begin() + first);
    }
    if (!world.alone()) sum_over_ranks(sums.data(), sums.size(), ncclFloat64);
    for (size_t i = 0; i < rows.size(); i++) result[rows[i].question][rows[i].ending] = sums[i];
    take_loss(m);   // clears the loss, to which these losses were added
    return result;
}

// ---- answers ------------------------------------------------------------------------------------

enum class By { SUM, MEAN };

// Returns the ending with the lowest loss; of equal ones, the first.
size_t answer(const Question& question, std::vector<double> losses, By by) {
    for (size_t e = 0; e < losses.size(); e++) {
        if (!std::isfinite(losses[e])) throw Failure("HellaSwag: the loss of an ending is %f", losses[e]);
        if (by == By::MEAN) losses[e] /= question.endings[e].size();
    }
    return std::min_element(losses.begin(), losses.end()) - losses.begin();
}

struct Score { double acc_norm; std::string text; };

Score hellaswag(Model& m, const std::vector<Question>& questions) {
    const EndingLosses losses = ending_losses(m, questions);
    auto accuracy = [&](By by) {
        double right = 0;
        for (size_t q = 0; q < questions.size(); q++)
            right += answer(questions[q], losses[q], by) == static_cast<size_t>(questions[q].label);
        return right / questions.size();
    };
    const double acc_norm = accuracy(By::MEAN);
    return {acc_norm, format("HellaSwag acc_norm %.4f, accuracy %.4f over %zu questions", acc_norm, accuracy(By::SUM),
                             questions.size())};
}
