// SPDX-License-Identifier: Apache-2.0

// Package cli is the command line of XsPIN. A program that imports it and handlers of
// its own is an xspin with these handlers, see docs/handlers.md:
//
//	package main
//
//	import (
//		"github.com/xspin/xspin/cli"
//
//		_ "example.com/my/handlers"
//	)
//
//	func main() { cli.Main() }
package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"
)

// Main runs the command that the arguments of the process name, one of this package or
// of more, and exits with status 1 if it fails.
func Main(more ...*cobra.Command) {
	if err := newRootCmd(more...).Execute(); err != nil {
		fmt.Fprintf(os.Stderr, "xspin: %s\n", calledBy().rewrite(err.Error()))
		os.Exit(1)
	}
}

// newRootCmd returns the whole command line.
func newRootCmd(more ...*cobra.Command) *cobra.Command {
	root := &cobra.Command{
		Use:   "xspin",
		Short: "A sPIN SmartNIC in software",
		Long: `XsPIN turns a network interface into a SmartNIC that runs small handlers on
every matching packet, and leaves all other traffic to Linux.

Every flag can also be set in the environment or in a file. The order is:
  1. the command line                 --count 100
  2. XSPIN_ and the command and flag  XSPIN_DEMO_PINGPONG_COUNT=100
  3. the configuration file           demo: {pingpong: {count: 100}}
The file is named by --config or XSPIN_CONFIG; otherwise it is /etc/xspin.yaml if
that exists.`,
		Version:       version(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          unknownCommand,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	file := root.PersistentFlags().String("config", "", "configuration file (YAML, TOML or JSON)")
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error { return configure(cmd, *file) }

	demo := &cobra.Command{Use: "demo", Short: "Demonstrations: the place to start, and code to imitate"}
	demo.AddCommand(newPingpongCmd(), newFileCmd(), newDatatypesCmd(), newInboxCmd())
	rules := newRulesCmd()
	rules.AddCommand(newRulesLsCmd())
	root.AddCommand(newRunCmd(), newCtxCmd(), demo, newLabCmd(), rules, newSendCmd(), newStatsCmd(), newTopCmd(), newLogCmd(), newCaptureCmd(), newMemCmd(), newDDTCmd(), newObjectCmd(), newVersionCmd())
	root.AddCommand(more...)
	root.AddCommand(newHelperCmds()...)
	root.AddCommand(newDatatypesHelperCmds()...)
	root.AddCommand(newLabHelperCmds()...)
	for _, group := range root.Commands() {
		if group.HasSubCommands() && !group.Runnable() {
			// Cobra would show help, and succeed, for a misspelt subcommand.
			group.Args, group.RunE = unknownCommand, root.RunE
		}
	}
	completeValues(root)
	return root
}

// unknownCommand refuses arguments of a command that only has subcommands.
func unknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	err := fmt.Errorf("unknown command %q for %q", args[0], cmd.CommandPath())
	cmd.SuggestionsMinimumDistance = 2
	if like := cmd.SuggestionsFor(args[0]); len(like) > 0 {
		err = fmt.Errorf("%w: did you mean %s?", err, strings.Join(like, " or "))
	}
	return err
}

// wantArgs accepts arguments of these names: NAME for one, NAME... for one or more, [NAME]
// for an optional one.
func wantArgs(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		usage := strings.TrimSuffix(cmd.CommandPath(), cmd.Name()) + cmd.Use
		for i, name := range names {
			many := strings.HasSuffix(name, "...")
			switch {
			case i < len(args) && many:
				return nil
			case i >= len(args) && !strings.HasPrefix(name, "["):
				return fmt.Errorf("%s: %s is missing: %s", commandName(cmd), strings.TrimSuffix(name, "..."), usage)
			}
		}
		if len(args) > len(names) {
			return fmt.Errorf("%s: unexpected argument %q: %s", commandName(cmd), args[len(names)], usage)
		}
		return nil
	}
}

// version returns the commit that this binary was built from.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.modified" && s.Value == "true" && !strings.HasSuffix(v, "+dirty") {
			v += "+dirty"
		}
	}
	return v + ", " + info.GoVersion
}

func newVersionCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the commit that this program was built from, and the Go version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "xspin version %s\n", version())
			return err
		},
	}
}

// defaultConfig is read if it exists.
const defaultConfig = "/etc/xspin.yaml"

// envKey makes a key the name of an environment variable, except for case and prefix.
var envKey = strings.NewReplacer(".", "_", "-", "_")

// configure gives flags that were not typed their values from the environment and the
// file.
func configure(cmd *cobra.Command, file string) error {
	if cmd.DisableFlagParsing {
		return nil // a hidden command, for processes that xspin starts itself
	}
	v := viper.New()
	v.SetEnvPrefix("XSPIN")
	v.SetEnvKeyReplacer(envKey)
	if file == "" {
		file = os.Getenv("XSPIN_CONFIG")
	}
	optional := file == ""
	if optional {
		file = defaultConfig
	}
	v.SetConfigFile(file)
	if err := v.ReadInConfig(); err != nil && !(optional && errors.Is(err, fs.ErrNotExist)) {
		return fmt.Errorf("configuration file %s: %w", file, err)
	}
	if slices.Contains(v.AllKeys(), "interfaces") {
		return fmt.Errorf("configuration file %s: it has values for flags, and this is the daemon's configuration, which is an argument: `xspin run %[1]s`", file)
	}
	if err := unknownKeys(cmd.Root(), v.AllKeys()); err != nil {
		return fmt.Errorf("configuration file %s: %w", file, err)
	}
	path := strings.ReplaceAll(strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" "), " ", ".")
	var errs []error
	cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		key := path + "." + f.Name
		if f.Changed || f.Name == "help" {
			return
		}
		_ = v.BindEnv(key) // fails for an empty key only
		if !v.IsSet(key) {
			return
		}
		value := v.GetString(key)
		if strings.HasSuffix(f.Value.Type(), "Slice") {
			value = strings.Join(v.GetStringSlice(key), ",")
		}
		if err := cmd.Flags().Set(f.Name, value); err != nil {
			where := "in " + file
			env := "XSPIN_" + strings.ToUpper(envKey.Replace(key))
			if _, set := os.LookupEnv(env); set {
				where = "in the environment (" + env + ")"
			}
			errs = append(errs, fmt.Errorf("%s %s: %w", key, where, err))
		}
	})
	return errors.Join(errs...)
}

// unknownKeys returns an error that names the keys that are not a flag of any command,
// such as misspelt ones.
func unknownKeys(root *cobra.Command, keys []string) error {
	known := map[string]bool{}
	var visit func(cmd *cobra.Command, path string)
	visit = func(cmd *cobra.Command, path string) {
		cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) { known[path+f.Name] = true })
		for _, sub := range cmd.Commands() {
			visit(sub, path+sub.Name()+".")
		}
	}
	visit(root, "")
	var errs []error
	for _, k := range keys {
		if !known[k] {
			errs = append(errs, fmt.Errorf("%q is not a command and flag: write them as in demo: {pingpong: {count: 100}}", k))
		}
	}
	return errors.Join(errs...)
}
