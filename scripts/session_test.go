// SPDX-License-Identifier: Apache-2.0

package scripts

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// readmeSession returns the commands of the README's section about the daemon, one by one;
// a here-document is one with what it feeds.
func readmeSession(t *testing.T) (commands []string) {
	t.Helper()
	b, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(b), "\n## Applications of your own, next to the NIC\n")
	_, block, _ := strings.Cut(section, "\n```\n")
	block, _, ok := strings.Cut(block, "\n```\n")
	if !ok {
		t.Fatal("README.md: no commands below \"Applications of your own, next to the NIC\"")
	}
	end := ""
	for line := range strings.SplitSeq(block, "\n") {
		if end != "" {
			commands[len(commands)-1] += "\n" + line
			if line == end {
				end = ""
			}
			continue
		}
		if _, word, ok := strings.Cut(line, "<<"); ok {
			end = word
		}
		commands = append(commands, line)
	}
	return commands
}

// checkout puts into dir what the README's commands name of a clone: bin/xspin, built with
// the flags of make build, and the README, which it returns.
func checkout(t *testing.T, dir string) (readme []byte) {
	t.Helper()
	build := exec.Command("go", "build", "-trimpath", "-o", filepath.Join(dir, "bin", "xspin"), "../cmd/xspin")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "README.md"), readme, 0o644); err != nil {
		t.Fatal(err)
	}
	return readme
}

// shell runs a command of the README: as root if it says sudo, else as a user.
func shell(t *testing.T, dir string, env []string, line string) *exec.Cmd {
	t.Helper()
	const nobody = 65534
	uid := uint32(nobody)
	if rest, ok := strings.CutPrefix(line, "sudo "); ok {
		uid, line = 0, rest
	}
	c := exec.CommandContext(t.Context(), "sh", "-c", "exec "+line)
	if strings.Contains(line, "\n") { // a here-document
		c = exec.CommandContext(t.Context(), "sh", "-c", line)
	}
	c.Dir, c.Env = dir, env
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	return c
}

// TestReadmeSession does what the README says about the daemon: root starts it, a user who
// is not root attaches the example application, and a file arrives there. Only names that
// all share are others: of the lab, of the socket and of the file in /tmp.
func TestReadmeSession(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	dir, err := os.MkdirTemp("", "xspin-readme")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	own := filepath.Join(dir, "own") // the user's
	for _, err := range []error{os.Chmod(dir, 0o755), os.Mkdir(own, 0o755), os.Chown(own, 65534, 65534)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	readme := checkout(t, dir)
	socket := filepath.Join(dir, "xspin.sock")
	env := append(os.Environ(), "XSPIN_SOCKET="+socket, "XSPIN_RUN_SOCKET="+socket, "HOME="+own)
	names := strings.NewReplacer(
		"/tmp/xspin.yaml", filepath.Join(own, "xspin.yaml"),
		"/tmp/xspin.sock", socket,
		"netns: xspin-nic", "netns: "+lab.NIC.Namespace,
		"lab exec host ", "lab exec "+lab.Host.Namespace+" ",
	)

	var daemon, app *exec.Cmd
	var daemonLog, appLog bytes.Buffer
	ended := make(chan error, 1)   // the daemon
	told := make(chan string, 100) // lines of the application
	expect := func(pattern string) {
		t.Helper()
		re, timeout := regexp.MustCompile(pattern), time.After(time.Minute)
		var seen []string
		for {
			select {
			case line, ok := <-told:
				if ok && re.MatchString(line) {
					return
				}
				if seen = append(seen, line); ok {
					continue
				}
			case <-timeout:
			}
			t.Fatalf("the application does not say %q, but %q", pattern, seen)
		}
	}
	defer func() {
		if app != nil && app.ProcessState == nil {
			_ = app.Process.Kill()
			_ = app.Wait()
		}
		if daemon != nil {
			_ = daemon.Process.Kill()
			<-ended
		}
		if t.Failed() {
			t.Logf("the daemon printed:\n%s\nthe application printed:\n%s", &daemonLog, &appLog)
		}
	}()

	sent := false
	for _, line := range readmeSession(t) {
		c := shell(t, dir, env, names.Replace(line))
		switch word := strings.TrimPrefix(line, "sudo "); {
		case line == "sudo bin/xspin lab up", strings.HasPrefix(line, "export XSPIN_SOCKET="):
			// Done, in our way.
		case strings.HasPrefix(word, "bin/xspin run "):
			if line == word {
				t.Errorf("the daemon is not root's: %s", line)
			}
			daemon, c.Stdout, c.Stderr = c, &daemonLog, &daemonLog
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			go func() { ended <- c.Wait(); close(ended) }()
			for until := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
				s, err := net.Dial("unix", socket)
				if err == nil {
					s.Close()
					break
				}
				if len(ended) > 0 || time.Now().After(until) {
					t.Fatal(err)
				}
			}
		case strings.HasPrefix(word, "bin/xspin demo inbox"):
			if line != word {
				t.Errorf("the application is root's: %s", line)
			}
			app, c.Stderr = c, &appLog
			out, err := c.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			go func() {
				defer close(told)
				for s := bufio.NewScanner(out); s.Scan(); {
					told <- s.Text()
				}
			}()
			expect("(?i)^attached")
		default:
			if out, err := c.CombinedOutput(); err != nil {
				t.Fatalf("%s\n%v: %s", line, err, out)
			}
			if strings.Contains(line, "bin/xspin send ") {
				sent = true
				expect(fmt.Sprintf("^message .*, sha256 %.8x", sha256.Sum256(readme)))
			}
		}
	}
	if daemon == nil || app == nil || !sent {
		t.Fatalf("the session lacks a daemon, an application or a file: %q", readmeSession(t))
	}
	if out, err := shell(t, dir, env, "bin/xspin ctx ls").CombinedOutput(); err != nil || !strings.Contains(string(out), "inbox") {
		t.Errorf("ctx ls: %v: %s", err, out)
	}

	// Ctrl-C.
	if err := daemon.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("the daemon ends with %v", err)
	}
	for range told {
	}
	if err := app.Wait(); err == nil || !strings.Contains(appLog.String(), "the daemon") {
		t.Errorf("the application ends with %v", err)
	}
}
