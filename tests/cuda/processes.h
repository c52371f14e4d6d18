// Processes of one program, one per rank, that exchange bytes through files.
#pragma once

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace anabranch::testing {

// A folder in which ranks meet. Its files are NAME.RANK.
class Meeting {
 public:
  Meeting(std::string folder, int rank, int ranks) : folder_(std::move(folder)), rank_(rank), ranks_(ranks) {}

  // Returns the bytes of all ranks, in the order of the ranks. Every call of a program has another name.
  std::vector<char> gather(const std::string& name, const std::vector<char>& own) const {
    const std::string file = path(name, rank_);
    std::ofstream(file + ".part", std::ios::binary).write(own.data(), static_cast<std::streamsize>(own.size()));
    std::filesystem::rename(file + ".part", file);
    std::vector<char> all;
    for (int r = 0; r < ranks_; ++r) {
      while (!std::filesystem::exists(path(name, r))) std::this_thread::sleep_for(std::chrono::microseconds(200));
      std::ifstream in(path(name, r), std::ios::binary);
      all.insert(all.end(), std::istreambuf_iterator<char>(in), {});
    }
    return all;
  }
  void wait(const std::string& name) const { gather(name, {}); }

 private:
  std::string path(const std::string& name, int r) const { return folder_ + "/" + name + "." + std::to_string(r); }
  std::string folder_;
  int rank_;
  int ranks_;
};

// Starts this program once per rank, with the arguments `--rank R RANKS FOLDER` and `more`, and returns the exit
// statuses of the processes. A process that still runs after the time limit is killed; its status is -1.
inline std::vector<int> run_ranks(int ranks, const std::vector<std::string>& more, std::chrono::seconds limit) {
  char folder[] = "/tmp/anabranch_ranks_XXXXXX";
  if (mkdtemp(folder) == nullptr) return std::vector<int>(static_cast<size_t>(ranks), -1);
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; ++r) {
    std::vector<std::string> words{"/proc/self/exe", "--rank", std::to_string(r), std::to_string(ranks), folder};
    words.insert(words.end(), more.begin(), more.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_t child = -1;
    if (posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments.data(), environ) != 0) child = -1;
    children.push_back(child);
  }
  const auto end = std::chrono::steady_clock::now() + limit;
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    pid_t ended = 0;
    while (child > 0 && (ended = waitpid(child, &status, WNOHANG)) == 0 && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    if (child > 0 && ended == 0) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
    }
    statuses.push_back(ended == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1);
  }
  std::filesystem::remove_all(folder);
  return statuses;
}

}  // namespace anabranch::testing
