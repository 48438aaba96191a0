// HellaSwag: questions of a context and four endings, one of which is how the text continued (Zellers et al. 2019,
// "HellaSwag: Can a Machine Really Finish Your Sentence?"). A model's answer is the ending whose tokens, after the
// context, have the lowest loss: as a sum (accuracy), or as a mean, which is fair to long endings (acc_norm). The mean
// is over tokens, as in llm.c, where GPT-2 124M has 0.2955 of the 10,042; others divide by the ending's bytes.
//
// A file is llm.c's, as scripts/prepare_hellaswag.py writes it, little-endian:
//
//     256 int32   magic 20240522, version 1, number of questions, bytes of the longest one, zeros
//     uint16      of each question 65535, its bytes, its index, the label, the number of endings; then the context and
//                 each ending, as a number of tokens and the tokens

#pragma once

constexpr int QUESTIONS_HEADER = 256, QUESTIONS_MAGIC = 20240522, QUESTIONS_VERSION = 1, QUESTION_BEGINS = 65535;

struct Question {
    int label;
    std::vector<int> context;
    std::vector<std::vector<int>> endings;
};

// ---- reading ------------------------------------------------------------------------------------

// Reads questions one after the other, for a model of V tokens that takes T inputs.
class QuestionReader {
public:
    QuestionReader(const std::string& path, int V, int T) : file_(path), V_(V), T_(T) {
        int header[QUESTIONS_HEADER];
        if (file_.size() < sizeof(header))
            throw UserError("%s: %zu bytes are too few for HellaSwag's header of %zu", path.c_str(), file_.size(),
                            sizeof(header));
        memcpy(header, file_.data(), sizeof(header));
        if (header[0] != QUESTIONS_MAGIC || header[1] != QUESTIONS_VERSION)
            throw UserError("%s: magic %d, version %d; expected %d, %d, a file of scripts/prepare_hellaswag.py",
                            path.c_str(), header[0], header[1], QUESTIONS_MAGIC, QUESTIONS_VERSION);
        count_ = header[2];
        if (count_ < 1) throw UserError("%s: the header says %d questions, expected 1 or more", path.c_str(), count_);
        at_ = sizeof(header);
    }

    std::vector<Question> all() {
        std::vector<Question> questions;
        for (; index_ < count_; index_++) questions.push_back(next());
        file_.require_whole();
        if (const size_t left = file_.size() - at_)
            throw UserError("%s: %zu bytes follow the last of %d questions", file_.path().c_str(), left, count_);
        return questions;
    }

private:
    [[noreturn]] void fail(const std::string& what) const {
        throw UserError("%s: question %d: %s", file_.path().c_str(), index_, what.c_str());
    }

    int word() {
        uint16_t value;
        if (at_ + sizeof(value) > file_.size()) fail(format("the file ends within it, of %d: truncated", count_));
        memcpy(&value, file_.data() + at_, sizeof(value));
        at_ += sizeof(value);
        return value;
    }
    void require(const char* what, int found, int expected) const {
        if (found != expected) fail(format("%s is %d, expected %d: damaged", what, found, expected));
    }

    std::vector<int> tokens(const std::string& part) {
        std::vector<int> tokens(word());
        if (tokens.empty()) fail("no tokens in " + part);
        for (int& token : tokens)
            if (token = word(); token >= V_)
                fail(format("token %d in %s is outside the vocabulary of %d", token, part.c_str(), V_));
        return tokens;
    }

    Question next() {
        const size_t begin = at_;
        require("its first number", word(), QUESTION_BEGINS);
        const int bytes = word();
        require("its index", word(), index_);
        Question question = {word(), {}, {}};
        const int endings = word();
        if (question.label >= endings) fail(format("label %d, but %d endings", question.label, endings));
        question.context = tokens("the context");
        for (int e = 0; e < endings; e++) {
            question.endings.push_back(tokens(format("ending %d", e)));
            // The last token is predicted, but predicts nothing.
            const size_t inputs = question.context.size() + question.endings.back().size() - 1;
            if (inputs > static_cast<size_t>(T_))
                fail(format("the context and ending %d have %zu tokens, expected at most %d: sequences of %d "
                            "(--seq-len), and the last token", e, inputs + 1, T_ + 1, T_));
        }
        require("the size in bytes", static_cast<int>(at_ - begin), bytes);
        return question;
    }

    MappedFile file_;
    int V_, T_, count_, index_ = 0;
    size_t at_ = 0;   // bytes
};

std::vector<Question> read_questions(const std::string& path, int V, int T) { return QuestionReader(path, V, T).all(); }

// ---- losses -------------------------------------------------------------------------------------

// Sequences are as long as their batch's longest, in steps of this: few shapes of matmul occur, and few tokens are
// padding, as sequences are batched by length.
constexpr size_t LENGTH_STEP = 8;

struct EndingLosses {
    std::vector<std::vector<double>> sums;   // of each question's endings
    size_t tokens = 0, padding = 0;          // that went through the model, and how many of them for nothing
};

// A context with one of its endings, without the last token: a sequence of inputs.
struct Asked { size_t question, ending, length; };

// The model's buffers serve for any B and T within their B x T tokens.
EndingLosses ending_losses(Model& m, const std::vector<Question>& questions) {
    std::vector<Asked> rows;
    EndingLosses result;
    for (size_t q = 0; q < questions.size(); q++) {
        result.sums.emplace_back(questions[q].endings.size());
        for (size_t e = 0; e < questions[q].endings.size(); e++)
            rows.push_back({q, e, questions[q].context.size() + questions[q].endings[e].size() - 1});
    }
    auto place = [](const Asked& a) { return std::make_tuple(-static_cast<long>(a.length), a.question, a.ending); };
    std::sort(rows.begin(), rows.end(), [&](const Asked& a, const Asked& b) { return place(a) < place(b); });
    const Setup& setup = m.setup;
    struct Part { size_t first, B, T; };
    std::vector<Part> parts;
    for (size_t first = 0, B = 0; first < rows.size(); first += B) {
        const size_t T = std::min<size_t>(setup.T, ceil_div(rows[first].length, LENGTH_STEP) * LENGTH_STEP);
        B = std::min({rows.size() - first, setup.N() / T, static_cast<size_t>(MAX_SEQUENCES)});
        parts.push_back({first, B, T});
    }
    // Ranks take turns. One that has none left computes the last batch once more, as all take part in communication.
    for (size_t turn = 0; turn < parts.size(); turn += world.size) {
        const bool is_mine = turn + world.rank < parts.size();
        const auto [first, B, T] = parts[is_mine ? turn + world.rank : parts.size() - 1];
        std::vector<int> inputs(B * T, 0), targets(B * T, -1);   // causal attention: what follows does not matter
        for (size_t b = 0; b < B; b++) {
            const Question& question = questions[rows[first + b].question];
            std::vector<int> tokens = question.context;
            const std::vector<int>& ending = question.endings[rows[first + b].ending];
            tokens.insert(tokens.end(), ending.begin(), ending.end());
            std::copy(tokens.begin(), tokens.end() - 1, inputs.begin() + b * T);
            std::copy(ending.begin(), ending.end(), targets.begin() + b * T + question.context.size() - 1);
        }
        forward(m, send_spare(m.a.inputs, inputs), {static_cast<int>(B), static_cast<int>(T)});
        head<Want::LOSS>(m, send_spare(m.a.targets, targets), 0, B * T);
        std::vector<float> losses(B * T);   // 0 where there is no target
        download(losses.data(), m.a.losses(), losses.size() * sizeof(float));
        for (size_t b = 0; is_mine && b < B; b++)
            result.sums[rows[first + b].question][rows[first + b].ending] =
                std::accumulate(losses.begin() + b * T, losses.begin() + (b + 1) * T, 0.0);
    }
    for (const Part& part : parts) {
        result.tokens += part.B * part.T;
        for (size_t b = 0; b < part.B; b++) result.padding += part.T - rows[part.first + b].length;
    }
    if (!world.alone()) {
        std::vector<double> all;
        for (const auto& sums : result.sums) all.insert(all.end(), sums.begin(), sums.end());
        sum_over_ranks(all.data(), all.size(), ncclFloat64);
        const double* from = all.data();
        for (auto& sums : result.sums)
            for (double& sum : sums) sum = *from++;
    }
    take_loss(m);   // which they were added to
    return result;
}

// ---- answers ------------------------------------------------------------------------------------

enum class By { SUM, MEAN };

// The model's choice: the ending of the lowest loss, of equals the first.
size_t answer(const Question& question, std::vector<double> losses, By by) {
    for (size_t e = 0; e < losses.size(); e++) {
        if (!std::isfinite(losses[e])) throw Failure("HellaSwag: the loss of an ending is %f", losses[e]);
        if (by == By::MEAN) losses[e] /= question.endings[e].size();
    }
    return std::min_element(losses.begin(), losses.end()) - losses.begin();
}

struct Score {
    size_t questions, by_sum, by_mean;   // answered rightly
    double padding, seconds;             // share of the tokens

    double accuracy() const { return double(by_sum) / questions; }
    double acc_norm() const { return double(by_mean) / questions; }
    std::string text() const {
        return format("HellaSwag acc_norm %.4f, accuracy %.4f over %zu questions", acc_norm(), accuracy(), questions);
    }
};

Score hellaswag(Model& m, const std::vector<Question>& questions) {
    const double began = seconds_now();
    const EndingLosses losses = ending_losses(m, questions);
    Score score = {questions.size(), 0, 0, double(losses.padding) / losses.tokens, seconds_now() - began};
    for (size_t q = 0; q < questions.size(); q++) {
        const size_t label = questions[q].label;
        score.by_sum += answer(questions[q], losses.sums[q], By::SUM) == label;
        score.by_mean += answer(questions[q], losses.sums[q], By::MEAN) == label;
    }
    return score;
}
