// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// block finds the files in a document: code blocks with a language and a path.
var block = regexp.MustCompile("(?ms)^```\\w+ (\\S+)\n(.*?)^```$")

// TestOwnXspin builds the program of docs/handlers.md, in a module of its own, and has
// it check the configuration there, which names its handlers.
func TestOwnXspin(t *testing.T) {
	doc, err := os.ReadFile("../docs/handlers.md")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	found := map[string]bool{}
	for _, m := range block.FindAllStringSubmatch(string(doc), -1) {
		write(m[1], m[2])
		found[m[1]] = true
	}
	for _, name := range []string{"main.go", "reverse/reverse.go", "reverse/reverse_test.go", "xspin.yaml"} {
		if !found[name] {
			t.Fatalf("docs/handlers.md has no %s", name)
		}
	}
	// What `go mod init` and `go mod tidy` would have made, without a network: the
	// versions are those of this module.
	repo, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile("../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	sum, err := os.ReadFile("../go.sum")
	if err != nil {
		t.Fatal(err)
	}
	const module = "module github.com/xspin/xspin\n"
	if !strings.Contains(string(mod), module) {
		t.Fatal("go.mod has another module")
	}
	own := strings.Replace(string(mod), module, "module example.com/ownxspin\n", 1)
	write("go.mod", own+"\nrequire github.com/xspin/xspin v0.0.0\n")
	write("go.sum", string(sum))

	workspace := []string{"GOWORK=off", "GOFLAGS=-mod=mod -trimpath"}
	run := func(fail bool, name string, args ...string) string {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		cmd.Env = append(append(os.Environ(), "CGO_ENABLED=0", "GOPROXY=off"), workspace...)
		out, err := cmd.CombinedOutput()
		if (err != nil) != fail {
			t.Fatalf("%s %v: %v\n%s", name, args, err, out)
		}
		return string(out)
	}
	clone := regexp.MustCompile(`(?m)^go mod edit -replace (\S+)=\.\./xspin `).FindSubmatch(doc)
	if clone == nil {
		t.Fatal("docs/handlers.md does not say how to use a clone")
	}
	run(false, "go", "mod", "edit", "-replace", string(clone[1])+"="+repo)
	if out := run(false, "go", "list", "-deps", "-f", "{{with .Module}}{{with .Replace}}{{.Dir}}{{end}}{{end}}", "./..."); !strings.Contains(out, repo+"\n") {
		t.Errorf("nothing comes from the clone, but from %q", out)
	}
	// In a workspace the clone's packages are those that are compiled already.
	write("go.work", regexp.MustCompile(`(?m)^go .*$`).FindString(string(mod))+"\nuse (\n\t.\n\t"+repo+"\n)\n")
	workspace = []string{"GOWORK=" + filepath.Join(dir, "go.work"), "GOFLAGS=-trimpath"}
	run(false, "go", "test", "./...") // which vets, too
	run(false, "go", "build", "-o", "ownxspin")
	if out := run(false, "./ownxspin", "run", "--check", "xspin.yaml"); out != "xspin.yaml: 1 interface, 1 context\n" {
		t.Errorf("check: %q", out)
	}
	if out := run(false, "./ownxspin", "run", "--help"); !strings.Contains(out, "sends each datagram back, reversed") {
		t.Errorf("the help does not name the handler:\n%s", out)
	}
	text, err := os.ReadFile(filepath.Join(dir, "xspin.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	write("bad.yaml", strings.Replace(string(text), "port: 5000", "port: many", 1))
	if out := run(true, "./ownxspin", "run", "--check", "bad.yaml"); !strings.Contains(out, `params.port: handler reverse: "many": want whole number, 0 to 65535`) {
		t.Errorf("bad parameter: %q", out)
	}
}
