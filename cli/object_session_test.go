// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/slmp"
)

// What docs/kernel-handlers.md has somebody type is typed, in a lab of the test's own, and
// what it says is printed is printed.
func TestSessionOfKernelHandlers(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	doc, err := os.ReadFile("../docs/kernel-handlers.md")
	if err != nil {
		t.Fatal(err)
	}
	dir, socket := t.TempDir(), filepath.Join(t.TempDir(), "s")
	bin := filepath.Join(dir, "bin")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(bin, "xspin"), "#!/bin/sh\nXSPIN_TEST_DAEMON=1 exec "+self+" \"$@\"\n")
	write(filepath.Join(bin, "sudo"), "#!/bin/sh\nexec \"$@\"\n")
	write(filepath.Join(dir, "my-handlers", "trace.pcap"), string(pcapFile(1, frameOf{udpFrame(5000, 'h', 'i'), 44})))
	env := append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "MAKEFLAGS=", "XSPIN_SOCKET="+socket, "XSPIN_RUN_SOCKET="+socket)
	run := func(line string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "bash", "-c", line)
		cmd.Dir, cmd.Env = dir, env
		var diag bytes.Buffer
		cmd.Stderr = &diag
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s\n%v\n%s%s", line, err, out, &diag)
		}
		return string(out)
	}
	// Names that all labs share are others here.
	done := map[string]bool{} // steps that the page has
	ours := func(line string) string {
		for _, r := range []struct{ old, new string }{
			{"netns: xspin-nic", "netns: " + lab.NIC.Namespace},
			{"lab exec host ", "lab exec " + lab.Host.Namespace + " "},
			{"ping -c 3 ", "ping -c 3 -i 0.01 "}, // for the test's sake
		} {
			if strings.Contains(line, r.old) {
				line, done[r.old] = strings.ReplaceAll(line, r.old, r.new), true
			}
		}
		return line
	}

	out := "" // of the last block of commands
	printed, configurations := 0, 0
	for _, block := range regexp.MustCompile("(?ms)^```([^\n]*)\n(.*?)^```$").FindAllStringSubmatch(string(doc), -1) {
		switch lang, name, _ := strings.Cut(block[1], " "); {
		case name != "":
			write(filepath.Join(dir, name), block[2])
			continue
		case lang == "" && strings.HasPrefix(block[2], "xspin: "): // an error, see TestVerifiersWords
			continue
		case lang == "": // what the commands print
			printed++
			for want := range strings.Lines(block[2]) {
				if !slices.ContainsFunc(strings.Split(out, "\n"), func(got string) bool { return alike(got, want) }) {
					t.Errorf("the commands do not print %q, but\n%s", want, out)
				}
			}
			continue
		case lang == "yaml":
			configurations++
			text := block[2]
			if strings.Contains(text, "split.bpf.o") {
				run("make split.bpf.o")
				splits(t, filepath.Join(dir, "split.bpf.o"))
			}
			if strings.HasPrefix(text, "- ") {
				text = "contexts:\n" + text
			}
			write(filepath.Join(dir, "check.yaml"), "kernel: administrators\ninterfaces:\n- name: eth1\n"+text)
			run("xspin run --check check.yaml")
			continue
		case lang != "sh":
			continue
		}
		out = ""
		for _, line := range typed(block[2]) {
			switch {
			case strings.HasPrefix(line, "cd "):
				dir = filepath.Join(dir, strings.TrimPrefix(line, "cd "))
			case line == "sudo xspin lab up": // there is one, of the test's own
				done[line] = true
			case strings.HasSuffix(line, " &"):
				done["&"] = true
				cmd := exec.Command("bash", "-c", "exec "+strings.TrimSuffix(line, " &"))
				var log bytes.Buffer
				cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = dir, env, &log, &log
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				defer func() {
					if err := cmd.Process.Signal(os.Interrupt); err != nil {
						t.Error(err)
					}
					if err := cmd.Wait(); err != nil {
						t.Errorf("the daemon ends with %v", err)
					}
					if t.Failed() {
						t.Logf("the daemon printed\n%s", &log)
					}
				}()
				eventually(t, func() error {
					show := exec.Command(filepath.Join(bin, "xspin"), "ctx", "show", "echo")
					show.Env = env
					if out, err := show.CombinedOutput(); err != nil {
						return fmt.Errorf("%w: %s", err, out)
					}
					return nil
				})
			case line == "sudo xspin ctx reload":
				done[line] = true
				if got := run(line); !strings.Contains(got, "context echo changed: began anew") {
					t.Errorf("%s prints %q", line, got)
				}
			case line == "make" && done["&"]: // after a change
				source := filepath.Join(dir, "echo.bpf.c")
				text, err := os.ReadFile(source)
				if err != nil {
					t.Fatal(err)
				}
				write(source, strings.Replace(string(text), "xspin_count(0, ", "xspin_count(1, ", 1))
				fallthrough
			default:
				out += run(ours(line))
			}
		}
	}
	if out := run("xspin ctx ls"); !strings.Contains(out, "\nmine ") {
		t.Errorf("the contexts are\n%s", out)
	}
	if out := run("xspin ctx show ping"); !strings.Contains(out, " 3 sent back, ") {
		t.Errorf("of pings it tells\n%s", out)
	}
	if len(done) != 6 || printed != 2 || configurations != 2 {
		t.Errorf("of the session were found %v, %d times what it prints, and %d configurations", done, printed, configurations)
	}
}

// splits checks that a message goes where the page says, by its number, port and first byte.
func splits(t *testing.T, file string) {
	t.Helper()
	port := segment(1, 0, 0, 'A')
	port.data[34], port.data[35] = 5000>>8, 5000&0xff
	trace := writeFile(t, "split.pcap", pcapFile(1, segment(2, 0, 0, 'A'), segment(1<<31, 0, 0, 'A'), port, segment(3, 0, 0, 'Q'), segment(4, 0, slmp.EOM)))
	out, _, err := object(t, "check", file, "-r", trace)
	if err != nil || !strings.Contains(out, "5 frames: 2 taken, 0 again, 0 ignored, 3 handed over,") {
		t.Errorf("%s%v", out, err)
	}
}

// typed are the commands of a shell block, each with its here-document.
func typed(block string) (commands []string) {
	end := ""
	for line := range strings.Lines(block) {
		if line = strings.TrimSuffix(line, "\n"); end == "" {
			commands = append(commands, line)
			_, end, _ = strings.Cut(line, "<<")
			end = strings.Trim(end, "'")
			continue
		}
		commands[len(commands)-1] += "\n" + line
		if line == end {
			end = ""
		}
	}
	return commands
}

// alike tells whether a line is the other, but for blanks, and for numbers that a compiler
// or a verifier makes.
func alike(a, b string) bool {
	same := func(s string) string {
		s = strings.Join(strings.Fields(s), " ")
		if strings.HasPrefix(s, "instructions ") {
			s = regexp.MustCompile(`\d+`).ReplaceAllString(s, "N")
		}
		return s
	}
	return same(a) == same(b)
}
