// SPDX-License-Identifier: Apache-2.0

package scripts

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"mvdan.cc/sh/v3/syntax"
)

// What is in every Debian: packages that are essential, and apt.
var everywhere = strings.Fields(`apt-cache apt-get awk bash cat chmod chroot cp cut date diff dirname dpkg-deb env
	false find flock grep head id install ls mkdir mktemp mount mv nice nproc paste pivot_root readlink rm rmdir sed setsid sh sha256sum sleep sort
	tail timeout touch tr true umount uname unshare xargs comm cmp seq`)

// Packages bring more than the program that the Makefile looks for.
var comesWith = map[string]string{
	"capinfos":       "tshark",
	"cc":             "gcc",
	"mpicc":          "mpichversion",
	"mpicc.mpich":    "mpichversion",
	"mpirun.openmpi": "mpicc.openmpi",
	"tc":             "ip",
}

// Where the name of a program is not written at the call, it is one of these; nil stands
// for programs that are built here. Of a function that starts what its callers say, it is
// what they say.
var named = map[string][]string{
	"eval/peers/peers.go Version":                             {"cc", "iperf3", "mpichversion", "mpirun.openmpi"},
	"eval/rx.go openC":                                        nil,
	"eval/slmp.go send":                                       nil,
	"eval/slmp_load.go runLoads":                              nil,
	"eval/slmp_load.go smallEcho":                             nil,
	"cli/object_session_test.go TestSessionOfKernelHandlers":  nil,
	"cli/own_test.go TestOwnXspin":                            {"go"},
	"daemon/privileges_test.go unitCapabilities":              nil,
	"daemon/privileges_test.go logsOfAUser":                   nil,
	"daemon/privileges_test.go withoutPrivileges":             nil,
	"daemon/kernel_test.go TestPrivilegesOfTheKernelTier":     nil,
	"demos/file/run.go send":                                  nil,
	"demos/pingpong/rtt/rtt_test.go TestEchoProcess":          nil,
	"eval/mpich/build.go build":                               {"mpicc", "mpicc.mpich", "mpicc.openmpi"},
	"eval/mpich/build_test.go TestBuildRefusesAnothersHeader": {"mpicc", "mpicc.mpich", "mpicc.openmpi"},
	"eval/mpich/gemm_test.go TestGEMMLibrary":                 nil,
	"eval/mpich/compare_test.go newPeer":                      nil,
	"eval/mpich/pair.go start":                                nil,
	"eval/mpich/unpacker.go StartUnpacker":                    nil,
	"netns/namespace.go Command":                              nil, // its callers are looked at
	"netns/namespace.go Exec":                                 nil, // what a user says
	"scripts/install_test.go verify":                          nil, // it does without
	"scripts/newuser_test.go environ":                         {"git", "go", "id", "make", "sh"},
	"scripts/newuser_test.go run":                             {"git", "make"},
	"scripts/tap/main.go run":                                 nil,
	"slmp/conn_test.go run":                                   {"ip", "tc"},
}

// The Makefile says what a machine needs, and installs it. So that nothing is forgotten
// there that happens to be on the machine of whoever writes a test, what the code, the
// tests and the scripts start is collected, and compared.
func TestMakefileNamesEveryProgram(t *testing.T) {
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	list := func(name string) []string {
		m := regexp.MustCompile(`(?m)^` + name + ` *:= *(.*)$`).FindSubmatch(makefile)
		if m == nil {
			t.Fatalf("the Makefile has no %s", name)
		}
		var programs []string
		for _, entry := range strings.Fields(string(m[1])) {
			program, packages, ok := strings.Cut(entry, ":")
			if !ok || packages == "" {
				t.Errorf("%s: %q names no package", name, entry)
			}
			programs = append(programs, program)
		}
		return programs
	}
	used := map[string]bool{}
	check := func(what string, programs map[string]string, lists ...string) {
		known := slices.Concat(everywhere, []string{"go", "gofmt", "make"})
		for _, l := range lists {
			known = append(known, list(l)...)
		}
		for _, p := range slices.Sorted(maps.Keys(programs)) {
			q := p
			if of, ok := comesWith[p]; ok {
				q = of
			}
			used[q] = true
			if !slices.Contains(known, q) {
				t.Errorf("%s starts %s, which is in none of %v of the Makefile", programs[p], p, lists)
			}
		}
	}
	check("Go", inGo(t), "TEST_TOOLS")
	check("Makefile", inMakefile(t, string(makefile)), "TEST_TOOLS")
	for script, lists := range map[string][]string{
		"../.ci/run":       {"TEST_TOOLS"},
		"../scripts/vm":    {"VM_TOOLS"},
		"../scripts/fresh": {"FRESH_TOOLS"},
	} {
		text, err := os.ReadFile(script)
		if err != nil {
			t.Fatal(err)
		}
		check(script, inShell(t, script, string(text)), lists...)
	}
	for _, l := range []string{"TEST_TOOLS", "BENCH_TOOLS", "VM_TOOLS", "FRESH_TOOLS"} {
		for _, p := range list(l) {
			if !used[p] {
				t.Errorf("%s has %s, which nothing starts", l, p)
			}
		}
	}
}

// A script that no list is named for would not be looked at.
func TestEveryScriptIsLookedAt(t *testing.T) {
	err := filepath.WalkDir("..", func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			if d != nil && d.Name() == ".git" {
				return filepath.SkipDir
			}
			return err
		}
		text, err := os.ReadFile(file)
		if err == nil && (strings.HasPrefix(string(text), "#!") || strings.HasSuffix(file, ".sh")) &&
			!slices.Contains([]string{"../.ci/run", "../scripts/vm", "../scripts/fresh"}, file) {
			t.Errorf("%s is a script that TestMakefileNamesEveryProgram does not know", file)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// The collector finds what it should.
func TestProgramsOfAScript(t *testing.T) {
	got := inShell(t, "x", `f() { one a; }
f | two && if three; then x=$(four) five; fi
export A=1; "$dir/six"; eval seven; exec eight; ! nine; timeout 5 ten; nice -n 3 eleven; command -v twelve
case $x in a) thirteen ;; esac; for i in $(fourteen); do :; done; cat <<END
fifteen $(sixteen)
END
/usr/bin/seventeen; xargs -r eighteen; env A=b nineteen; trap 'twenty x' EXIT`)
	want := strings.Fields("cat eight eighteen eleven env five four fourteen nice nine nineteen one seven seventeen sixteen ten thirteen three timeout twenty two xargs")
	if names := slices.Sorted(maps.Keys(got)); !slices.Equal(names, want) {
		t.Errorf("%v\nwant %v", names, want)
	}
}

// inMakefile collects from recipes: where they start which program.
func inMakefile(t *testing.T, text string) map[string]string {
	t.Helper()
	programs := map[string]string{}
	text = strings.ReplaceAll(text, "\\\n", "\\\x00") // a recipe's line goes on
	for line := range strings.SplitSeq(text, "\n") {
		recipe, ok := strings.CutPrefix(line, "\t")
		if !ok {
			continue
		}
		recipe = strings.ReplaceAll(strings.TrimLeft(recipe, "@-+"), "\\\x00", "\\\n")
		// Innermost first: functions of make have arguments that are variables.
		for variable := regexp.MustCompile(`(^|[^$])\$\([^$()]*\)`); variable.MatchString(recipe); {
			recipe = variable.ReplaceAllString(recipe, "${1}VARIABLE")
		}
		recipe = strings.ReplaceAll(recipe, "$$", "$")
		maps.Copy(programs, inShell(t, "Makefile", recipe))
	}
	return programs
}

// inShell collects the first words of a script's commands, and those of commands that
// start others. Builtins, functions, and what is called by a path that the script makes,
// are none.
func inShell(t *testing.T, name, text string) map[string]string {
	t.Helper()
	file, err := syntax.NewParser().Parse(strings.NewReader(text), name)
	if err != nil {
		t.Fatalf("%s: %v\n%s", name, err, text)
	}
	own := strings.Fields(`. : [ alias bg break cd command continue declare echo eval exec exit export fg getopts hash jobs
		kill local printf pwd read return set shift source test times trap type typeset ulimit umask unset wait VARIABLE`)
	syntax.Walk(file, func(n syntax.Node) bool {
		if f, ok := n.(*syntax.FuncDecl); ok {
			own = append(own, f.Name.Value)
		}
		return true
	})
	programs := map[string]string{}
	var command func(words []string)
	command = func(words []string) {
		// words are "" where they are not literal.
		if len(words) == 0 || words[0] == "" {
			return
		}
		w := words[0]
		if strings.Contains(w, "/") && !strings.HasPrefix(w, "/usr/") && !strings.HasPrefix(w, "/bin/") {
			return
		}
		if w = path.Base(w); !slices.Contains(own, w) {
			programs[w] = name
		}
		rest := words[1:]
		switch w {
		case "trap":
			if len(rest) > 0 && rest[0] != "" {
				maps.Copy(programs, inShell(t, name, rest[0]))
			}
			return
		case "command":
			if len(rest) > 0 && strings.HasPrefix(rest[0], "-") {
				return // it asks
			}
		case "eval", "exec", "nice", "timeout", "xargs", "env", "setsid", "nohup", "sudo", "chroot":
		default:
			return
		}
		for len(rest) > 0 && (strings.HasPrefix(rest[0], "-") || strings.Contains(rest[0], "=") || regexp.MustCompile(`^[0-9]+[a-z]?$|^\.$`).MatchString(rest[0])) {
			rest = rest[1:]
		}
		command(rest)
	}
	syntax.Walk(file, func(n syntax.Node) bool {
		if c, ok := n.(*syntax.CallExpr); ok {
			var words []string
			for _, w := range c.Args {
				words = append(words, literal(w))
			}
			command(words)
		}
		return true
	})
	return programs
}

// literal is the text of a word, or "" if it is not known before the script runs.
func literal(w *syntax.Word) string {
	var text strings.Builder
	for _, p := range w.Parts {
		switch p := p.(type) {
		case *syntax.Lit:
			text.WriteString(p.Value)
		case *syntax.SglQuoted:
			text.WriteString(p.Value)
		case *syntax.DblQuoted:
			for _, q := range p.Parts {
				l, ok := q.(*syntax.Lit)
				if !ok {
					return ""
				}
				text.WriteString(l.Value)
			}
		default:
			return ""
		}
	}
	return text.String()
}

// inGo collects what Go code starts or looks for.
func inGo(t *testing.T) map[string]string {
	t.Helper()
	programs := map[string]string{}
	seen := map[string]bool{}
	err := filepath.WalkDir("..", func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(file, ".go") {
			return err
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, file, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		name, _ := filepath.Rel("..", file)
		for _, g := range f.Comments {
			for _, c := range g.List {
				if line, ok := strings.CutPrefix(c.Text, "//go:generate "); ok {
					maps.Copy(programs, inShell(t, name, line))
					for _, m := range regexp.MustCompile(` -(?:cc|strip) (\S+)`).FindAllStringSubmatch(line, -1) {
						programs[m[1]] = name
					}
				}
			}
		}
		for _, decl := range f.Decls {
			where := name
			if fn, ok := decl.(*ast.FuncDecl); ok {
				where += " " + fn.Name.Name
			}
			// Variables with the path of this very program, or of one that is looked for.
			found := map[string]bool{}
			ast.Inspect(decl, func(n ast.Node) bool {
				if a, ok := n.(*ast.AssignStmt); ok && len(a.Rhs) == 1 {
					if call, ok := a.Rhs[0].(*ast.CallExpr); ok {
						if name := types.ExprString(call.Fun); name == "exec.LookPath" || name == "os.Executable" {
							found[types.ExprString(a.Lhs[0])] = true
						}
					}
				}
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				args := programOf(call)
				if len(args) == 0 {
					return true
				}
				program, ok := stringOf(args[0])
				switch {
				case !ok:
					if who, is := args[0].(*ast.Ident); is && found[who.Name] {
						return true
					}
					seen[where] = true
					if _, ok := named[where]; !ok {
						t.Errorf("%s: %s starts a program whose name is not written there: say in `named` which it can be", fset.Position(call.Pos()), where)
					}
					return true
				case strings.HasPrefix(program, "/proc/"):
					return true // this very program
				}
				programs[path.Base(program)] = where
				if base := path.Base(program); (base == "sh" || base == "bash") && len(args) > 2 {
					if option, _ := stringOf(args[1]); option == "-c" {
						if script, ok := stringOf(args[2]); ok {
							maps.Copy(programs, inShell(t, where, script))
						}
					}
				}
				return true
			})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for where, list := range named {
		if !seen[where] {
			t.Errorf("`named` has %s, which starts nothing by a name from elsewhere", where)
		}
		for _, p := range list {
			programs[path.Base(p)] = where
		}
	}
	return programs
}

// programOf returns a call's arguments from the name of the program on, if it starts or
// looks for one: exec.Command, exec.CommandContext, exec.LookPath, and the method Command
// of namespaces.
func programOf(call *ast.CallExpr) []ast.Expr {
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return nil
	}
	x, _ := sel.X.(*ast.Ident)
	isExec := x != nil && x.Name == "exec"
	switch {
	case isExec && (sel.Sel.Name == "Command" || sel.Sel.Name == "LookPath") && len(call.Args) > 0:
		return call.Args
	case isExec && sel.Sel.Name == "CommandContext" && len(call.Args) > 1,
		!isExec && sel.Sel.Name == "Command" && len(call.Args) > 1:
		return call.Args[1:]
	}
	return nil
}

func stringOf(e ast.Expr) (string, bool) {
	l, ok := e.(*ast.BasicLit)
	if !ok || l.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(l.Value)
	return s, err == nil
}
